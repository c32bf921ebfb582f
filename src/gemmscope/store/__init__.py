"""Nothing measured is lost: the run file is what every command writes and every later one reads."""
