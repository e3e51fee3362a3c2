"""CSA2's operations, one per file: tensors in, tensors out, no host import, no import of the reference."""
