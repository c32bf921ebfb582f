"""What the chip is and how it is doing: the driver's own figures, and the manifest of a machine."""
