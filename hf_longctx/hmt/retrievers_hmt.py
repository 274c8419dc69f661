"""Import all retrievers of the package, in the order of their embeddings in a segment.

transformers copies the imported files to the folder of saved weights.
"""

from .bank_hmt import Bank
from .neural_cache_hmt import NeuralCacheRetriever
from .retriever_hmt import Retrievers
from .search_hmt import Search


__all__ = ["Bank", "NeuralCacheRetriever", "Retrievers", "Search"]
