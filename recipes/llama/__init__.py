"""Llama 3: the model, its loss, and exchange of weights with Hugging Face."""

from recipes.llama.config import LlamaConfig
from recipes.llama.task import LlamaTask

__all__ = ["LlamaConfig", "LlamaTask"]
