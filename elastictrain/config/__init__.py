"""One frozen dataclass per conf/ group, composed in RunConfig; Hydra in, validated objects out."""
