"""compile: the layers of the decoder are compiled by torch; on several devices they are split as in tp.

Inductor fuses what lies between matrix products. The first forward of each shape compiles; torch keeps the results in
its cache folder (TORCHINDUCTOR_CACHE_DIR), so that later launches compile faster.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from pytest_llmgpu.inference import scoring
from pytest_llmgpu.inference.compiled_layers import CompiledLayers
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded
from pytest_llmgpu.strategies.tp import TensorParallel


class Compiled(TensorParallel):
    """torch.compile on top of tp; on one device, of the plain model."""

    name = "compile"
    compiler = "inductor"
    """Torch has the compiler under this name."""

    def check(self, case: Case, source: ModelSource) -> None:
        """Refuse what tp refuses, except a single device, and a KV cache that grows."""
        if case.scoring == scoring.HARNESS:
            remedy = "which strategy compile would have to compile for each layer: use --llmgpu-scoring=lean"
            raise ValueError(f"--llmgpu-scoring=harness: it keeps a KV cache that grows, {remedy}")
        if source.experts == "eager":
            raise ValueError("--llmgpu-experts=eager: its loop cannot be compiled whole: use grouped_mm or batched_mm")
        if case.devices > 1:
            super().check(case, source)

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model as mp on one device and as tp on several; its layers are compiled at their first forward.

        ValueError if the cache folder is of another user.
        """
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            # The default has a known name in a folder of all users.
            folder = Path(cache_dir())
            if folder.stat().st_uid != os.getuid():
                remedy = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
                raise ValueError(f"{folder} is of another user, and torch would run the code in it: {remedy}")
        loaded = super().load(case, source) if case.devices > 1 else LayerParallel().load(case, source)
        return dataclasses.replace(loaded, compiled=CompiledLayers(loaded.model, self.compiler))

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> None:  # noqa: ARG002 - batches decide what is compiled
        """Forget the graphs of the case before."""
        assert loaded.compiled is not None
        loaded.compiled.reset()
