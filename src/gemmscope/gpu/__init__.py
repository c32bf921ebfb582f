"""Facts about GPUs: what the driver reports, the datasheets, and the machine's environment."""
