"""What runs on a GPU host: `gpu.sh` and the modules that it calls."""
