"""Two or more runs of the same thing, row by row."""
