"""Prefill and decode of one sequence with Hugging Face Transformers, in two processes.

The smallest real engine: no batch, no scheduler, no pages that requests share.  P runs a prompt but for its last token
and publishes what the model's ``DynamicCache`` then holds; D reads it and goes on, and every bit of its logits is what
it would be in one process::

    with SequenceCache(client, model, 4096, compatibility_key="my-model@rev") as sequence:  # P
        ticket = sequence.prefill(prompt, "request-1")

    with SequenceCache(client, model, 4096, compatibility_key="my-model@rev") as sequence:  # D
        model.generate(prompt, cache=sequence.read(ticket))

Every model will do whose cache is made of full attention, of linear-attention states (Mamba, Mamba2, gated delta nets,
KDA, short convolutions), or of both in one layer.  Others are refused, with the layer and the reason.
"""

try:
    import torch as _torch  # noqa: F401
    from transformers import __version__ as _version
    from transformers import cache_utils as _cache_utils
except ImportError as error:
    raise ImportError(
        f"kvxfer.engines.transformers needs torch and Transformers ({error}): pip install torch 'kvxfer[transformers]'",
        name=error.name,
    ) from error

if not hasattr(_cache_utils, "DummyLayer"):
    raise ImportError(
        f"kvxfer.engines.transformers needs the caches of Transformers 5.23 or newer, this is {_version}: "
        "pip install 'kvxfer[transformers]', with Python 3.11 or newer",
        name="transformers",
    )

from kvxfer.engines.transformers.caches import Held, held, rebuild
from kvxfer.engines.transformers.layout import Part, SequenceLayout
from kvxfer.engines.transformers.presets import compare
from kvxfer.engines.transformers.sequence import MakeMemory, SequenceCache

__all__ = ["Held", "MakeMemory", "Part", "SequenceCache", "SequenceLayout", "compare", "held", "rebuild"]
