"""The cases of the area fused."""
