"""What can be checked: implementations, those that are built in, and adapters."""
