"""The command line: thin verbs that import the part they need when they run."""
