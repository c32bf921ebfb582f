"""One file per framework. Each runs every recipe through the same lines; only the recipe object varies."""
