"""The first run on GPUs: what an emulated device cannot show. ``make test-gpu`` runs it."""
