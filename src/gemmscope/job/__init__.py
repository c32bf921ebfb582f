"""A model together with how it is run, from what was typed to what one rank computes."""
