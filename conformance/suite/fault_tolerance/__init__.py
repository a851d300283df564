"""The cases of the area fault_tolerance."""
