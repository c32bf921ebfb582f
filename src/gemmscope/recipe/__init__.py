"""What a precision does: which operands each pass multiplies, what is quantized, what that costs in bytes."""
