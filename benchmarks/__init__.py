"""How fast an implementation is: workloads, one timing core, and peers on the same work."""
