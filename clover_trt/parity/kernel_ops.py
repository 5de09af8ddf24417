"""The plugin kernels from PyTorch, without TensorRT: `torch.ops.clover.*`, and the model's operations on top of them.

The plugin library takes CUDA tensors; the kernels compiled for the host (plugins/CMakePresets.json, preset `host`) take
tensors in ordinary memory, thread by thread, for tests.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clover_trt.engine.plugins import BFLOAT16, E2M1, E4M3, FLOAT32, LONGEST_BLOCK, GdnShape, HeadShape, MoeShape, open_library
from clover_trt.errors import EngineError
from clover_trt.model.attention import block_attention
from clover_trt.model.gdn import GdnCache, GdnWeights
from clover_trt.model.head import Controls, HeadOutput
from clover_trt.model.lengths import Lengths
from clover_trt.model.ops import BlockOps

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float8_e4m3fn: E4M3, torch.int8: E2M1}


def _pointers(*tensors: Tensor | None) -> ctypes.Array[Any]:
    """The arguments structure of a kernel: addresses in the order of its fields.

    Raises:
        EngineError: a tensor does not begin at a multiple of 16 bytes, as views into a mapped file may.
    """
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), "kernels take contiguous tensors"
        if tensor is not None and tensor.numel() and tensor.element_size() <= 2 and tensor.data_ptr() % 16:
            raise EngineError(f"a tensor {list(tensor.shape)} does not begin at a multiple of 16 bytes; clone it")
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


class Kernels:
    """The launchers of a library, over tensors.

    Args:
        path: the plugin library, or the kernels compiled for the host.

    Raises:
        EngineError: the library can't be used, or a call asks for sizes that the kernels are not written for.
    """

    def __init__(self, path: Path) -> None:
        self._library = open_library(path)

    def _call(
        self, name: str, launcher: str, kind: tuple[int, ...], shape: Any, arguments: ctypes.Array[Any], like: Tensor
    ) -> None:
        lib, of_workspace = self._library, kind if name == "moe" else ()
        wrong = getattr(lib, f"clover_{name}_unsupported")(*of_workspace, ctypes.byref(shape))
        if wrong is not None:
            raise EngineError(f"{launcher}: expected {wrong.decode()}")
        size = getattr(lib, f"clover_{name}_workspace")(*of_workspace, ctypes.byref(shape))
        workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
        stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else None
        status = getattr(lib, f"clover_{launcher}")(
            *kind, ctypes.byref(shape), arguments, ctypes.c_void_p(workspace.data_ptr()), ctypes.c_void_p(stream)
        )
        if status != 0:
            raise EngineError(f"{launcher}: CUDA error {status}")

    def gdn_block_scan(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        weights: GdnWeights,
        conv_state: Tensor,
        recurrent_state: Tensor,
        lengths: Lengths,
    ) -> Tensor:
        """See `model.gdn.gdn_block_scan`; the states are advanced in place.

        Args:
            qkv, a, b, conv_state: float32 or bfloat16, with the convolutions of `weights` in the same type; the rest float32.

        Returns:
            `[B, T, v_heads, v_dim]`.
        """
        (B, T, C), (v_heads, k_dim, v_dim) = qkv.shape, recurrent_state.shape[1:]
        k_heads = (C - v_heads * v_dim) // (2 * k_dim)
        kernel, right = weights.conv.shape[-1], weights.right_conv.shape[-1]
        shape = GdnShape(B, T, k_heads, v_heads, k_dim, v_dim, kernel, right, min(T, LONGEST_BLOCK))
        out = torch.empty(B, T, v_heads, v_dim, dtype=qkv.dtype, device=qkv.device)
        states = (conv_state, recurrent_state)
        arguments = _pointers(qkv, a, b, *weights, *states, *lengths, out, *states)
        self._call("gdn", "gdn_block_scan", (TYPES[qkv.dtype],), shape, arguments, qkv)
        return out

    def expert_subset_moe(
        self,
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        shared: tuple[Tensor, ...],
        lengths: Lengths,
        mass: Tensor,
        top_k: int,
        scales: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `model.moe.expert_subset_moe`.

        Args:
            x, router, shared: bfloat16.
            gate_up, down: bfloat16; float8_e4m3fn with `scales` `[E, 2I / 128, H / 128]` and `[E, H / 128, I / 128]`; or int8,
                interleaved NVFP4 (see `checkpoint.nvfp4`) with e4m3 scales of groups and float32 ones of whole matrices.
            scales: gate_up's and down's, then those of whole matrices.

        Returns:
            `[B, T, H]`, zero at padding, and the number of distinct experts, `[1]` int64.
        """
        (B, T, H), (E, _, width) = x.shape, down.shape
        width *= 2 if down.dtype == torch.int8 else 1
        shape = MoeShape(B, T, H, E, top_k, width, shared[0].shape[0], min(T, LONGEST_BLOCK))
        out = torch.empty_like(x)
        distinct = torch.empty(1, dtype=torch.int64, device=x.device)
        padded = (*scales, *[None] * (4 - len(scales)))
        arguments = _pointers(x, router, gate_up, down, *shared, *lengths, mass, *padded, out, distinct)
        self._call("moe", "expert_subset_moe", (TYPES[gate_up.dtype],), shape, arguments, x)
        return out, distinct

    def confidence_head(
        self, hidden: Tensor, weight: Tensor, vocab_mask: Tensor, controls: Controls, candidates: int, want_logits: bool = False
    ) -> HeadOutput:
        """See `model.head.confidence_head`; `hidden` and `weight` are bfloat16. Logits are empty unless asked for."""
        (B, L, H), V = hidden.shape, weight.shape[0]
        shape = HeadShape(B, L, H, V, controls.history_ids.shape[1], controls.bias_ids.shape[1], candidates)
        ids = torch.empty(B, L, candidates, dtype=torch.int64, device=hidden.device)
        logprobs = torch.empty(B, L, candidates, device=hidden.device)
        logits = torch.empty(B, L, V if want_logits else 0, device=hidden.device)
        arguments = _pointers(hidden, weight, vocab_mask, *controls, ids, logprobs, logits if want_logits else None)
        self._call("head", "confidence_head", (), shape, arguments, hidden)
        return HeadOutput(ids, logprobs, logits)


def kernel_ops(kernels: Kernels) -> BlockOps:
    """The model's operations on the kernels; block attention stays PyTorch's. States are copied, not changed in place."""

    def gdn(qkv: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, cache: GdnCache, lengths: Lengths) -> tuple[Tensor, GdnCache]:
        states = GdnCache(cache.conv.clone(), cache.recurrent.clone())
        plain = (qkv.contiguous(), a.contiguous(), b.contiguous())
        return kernels.gdn_block_scan(*plain, GdnWeights(*(w.detach() for w in weights)), *states, lengths), states

    def moe(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return kernels.expert_subset_moe(x.contiguous(), *rest)

    def head(hidden: Tensor, weight: Tensor, vocab_mask: Tensor, controls: Controls, candidates: int) -> HeadOutput:
        return kernels.confidence_head(hidden.contiguous(), weight, vocab_mask, controls, candidates, want_logits=True)

    return BlockOps(block_attention=block_attention, gdn_block_scan=gdn, expert_subset_moe=moe, confidence_head=head)


def register(kernels: Kernels) -> torch.library.Library:
    """Define `torch.ops.clover.gdn_block_scan`, `expert_subset_moe` and `confidence_head` on these kernels.

    Returns:
        the registration; the operators go when it does.
    """
    library = torch.library.Library("clover", "DEF")
    key = "CompositeExplicitAutograd"
    library.define(
        "gdn_block_scan(Tensor qkv, Tensor a, Tensor b, Tensor[] weights, Tensor(a!) conv_state, Tensor(b!) recurrent_state, "
        "Tensor[] lengths) -> Tensor"
    )
    library.impl(
        "gdn_block_scan",
        lambda qkv, a, b, weights, conv_state, recurrent_state, lengths: kernels.gdn_block_scan(
            qkv, a, b, GdnWeights(*weights), conv_state, recurrent_state, Lengths(*lengths)
        ),
        key,
    )
    library.define(
        "expert_subset_moe(Tensor x, Tensor router, Tensor gate_up, Tensor down, Tensor[] shared, Tensor[] lengths, Tensor mass, "
        "int top_k, Tensor[] scales) -> (Tensor, Tensor)"
    )
    library.impl(
        "expert_subset_moe",
        lambda x, router, gate_up, down, shared, lengths, mass, top_k, scales: kernels.expert_subset_moe(
            x, router, gate_up, down, tuple(shared), Lengths(*lengths), mass, top_k, tuple(scales)
        ),
        key,
    )
    library.define(
        "confidence_head(Tensor hidden, Tensor weight, Tensor vocab_mask, Tensor[] controls, int candidates) -> (Tensor, Tensor)"
    )
    library.impl(
        "confidence_head",
        lambda hidden, weight, vocab_mask, controls, candidates: kernels.confidence_head(
            hidden, weight, vocab_mask, Controls(*controls), candidates
        )[:2],
        key,
    )
    return library
