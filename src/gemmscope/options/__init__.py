"""Every option, declared once: the command line, the functions of `commands/`, the Python API and the reference follow."""
