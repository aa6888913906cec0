"""Several ranks as one engine: data between their devices, control messages between their hosts. Imports no torch."""
