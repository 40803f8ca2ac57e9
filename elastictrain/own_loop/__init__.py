"""The run for training loops that users write themselves; `elastictrain.attach` makes one."""
