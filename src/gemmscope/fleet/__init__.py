"""What follows from the measurements of many GPUs: the spread from chip to chip, outliers, and what else differs there."""
