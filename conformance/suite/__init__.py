"""The suite: one file an area and topic; a case is a function of an implementation and literals."""
