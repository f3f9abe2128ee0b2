"""The persistent decode kernel: its plan, its generated header, and what the host packs for it."""
