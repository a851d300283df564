"""The cases of the area warmup."""
