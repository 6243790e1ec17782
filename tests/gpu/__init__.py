"""What a GPU would show, shown without one: an emulated device, and what must hold on every device."""
