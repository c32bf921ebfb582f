"""The command line: parses options, calls one function of `commands/`, writes the result."""
