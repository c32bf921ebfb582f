"""How long it should take, on a GPU that is not here: fitted once to measured times, computed from sizes."""
