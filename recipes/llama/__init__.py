"""Llama 3: the model, its loss, and exchange of weights with Hugging Face."""

from .config import LlamaConfig
from .task import LlamaTask

__all__ = ["LlamaConfig", "LlamaTask"]
