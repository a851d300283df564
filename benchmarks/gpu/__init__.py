"""What runs on a GPU host: `first_light.sh` and the modules that it calls."""
