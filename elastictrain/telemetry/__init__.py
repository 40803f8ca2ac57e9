"""What the user sees: TensorBoard, progress on the terminal, utilisation."""
