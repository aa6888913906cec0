"""Several ranks as one engine: the data plane between devices, and the control plane between the ranks' hosts. No torch here."""
