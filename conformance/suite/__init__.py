"""The suite: one file per area and topic; a case is a function of an implementation and literals."""
