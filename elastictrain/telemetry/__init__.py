"""What a person sees: TensorBoard, progress on the terminal, utilisation."""
