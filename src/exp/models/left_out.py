"""Names of torch that a forward program may not use: why, and what to write instead. Imports no torch.

The page docs/vocabulary.md is made from these lists, and from those of models/vocabulary.py.
"""
# ruff: noqa: SIM905  (lists of words are read more easily as words)

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from exp.models import vocabulary


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why names are left out.

    title: of the group on the page. why: completes "the method `.item` ...". expected: what to write, for those that
    have nothing better in `instead`. pattern: of names that have the reason as well.
    """

    title: str
    why: str
    expected: str
    words: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None
    instead: Mapping[str, str] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        """Whether it is the reason of a name."""
        known = name in self.words or name in self.instead
        return known or (self.pattern is not None and self.pattern.fullmatch(name) is not None)


IN_PLACE = re.compile(r"[A-Za-z]\w*_")
_NO_VALUE = "an operation on the whole tensor, such as where(condition, a, b)"

REASONS = (
    Reason(
        title="Written in place",
        why="writes into its tensor, which other names may hold",
        expected="the function's result under a name",
        pattern=IN_PLACE,
        instead={
            "requires_grad_": "nothing: parameters learn unless `freeze` names them",
            "copy_": "the other tensor itself, or where(mask, a, b)",
            "fill_": "`full_like(x, value)`",
            "zero_": "`zeros_like(x)`",
            "uniform_": "`rand_like(x)`",
            "normal_": "`randn_like(x)`",
            **dict.fromkeys(("exponential", "exponential_"), "`-log(1 - rand_like(x))`"),
            **dict.fromkeys(("cauchy", "geometric", "log_normal", "uniform", "random_"), "`rand_like` or `randn_like`"),
            **dict.fromkeys(("resize_", "resize_as_", "resize", "resize_as"), "`reshape`"),
            "index_put_": "`index_put(...)`, whose result is a new tensor",
        },
    ),
    Reason(
        title="Memory that nobody has written",
        why="gives whatever was in memory",
        expected="`zeros`",
        instead={
            "empty": "`zeros`",
            "empty_like": "`zeros_like`",
            "empty_permuted": "`zeros`",
            "empty_quantized": "`zeros`",
            "empty_strided": "`zeros`",
            "new": "`new_zeros`",
            "new_empty": "`new_zeros`",
            "new_empty_strided": "`new_zeros`",
        },
    ),
    Reason(
        title="Values read back to Python",
        why="reads values out of a tensor, which no branch of a program may depend on",
        expected=_NO_VALUE,
        words=frozenset("is_nonzero is_same_size is_set_to is_storage".split()),
        instead={
            "item": "the tensor itself",
            "tolist": "the tensor itself",
            "numpy": "the tensor itself",
            "allclose": "`isclose`",
            "equal": "`eq`",
        },
    ),
    Reason(
        title="Memory and layouts",
        why="looks at memory rather than at numbers",
        expected="an operation on numbers, such as `reshape` or `contiguous`",
        words=frozenset(
            """
            as_strided as_strided_ as_strided_copy as_strided_scatter as_subclass asarray const_data_ptr data_ptr
            dim_order frombuffer from_dlpack from_file from_numpy is_distributed is_pinned is_shared itemsize layout
            memory_format name names nbytes pin_memory record_stream set_ share_memory_ slice_copy slice_inverse
            storage storage_offset storage_type to_dlpack to_mkldnn to_padded_tensor typed_storage untyped_storage
            """.split()
        ),
        pattern=re.compile(r"(is_)?(vulkan|xla|mkldnn|mps|meta|nested|ipu|maia|mtia)\w*"),
    ),
    Reason(
        title="Sparse layouts but the plain one",
        why="belongs to a sparse layout that most operators do not take",
        expected="`to_sparse` and `to_dense`, or `torch.sparse.mm`",
        words=frozenset(
            """
            ccol_indices ccol_indices_copy coalesce col_indices col_indices_copy crow_indices crow_indices_copy
            dense_dim dsmm hsmm hspmm indices indices_copy is_coalesced is_sparse is_sparse_csr row_indices
            row_indices_copy saddmm smm sparse_dim sparse_mask spmm sspaddmm values values_copy
            """.split()
        ),
        pattern=re.compile(r"sparse_(coo|csr|csc|bsr|bsc|compressed)_tensor|to_sparse_\w+|SparseSemi\w+"),
    ),
    Reason(
        title="Gradients and their switches",
        why="belongs to the backward, which the run itself does",
        expected="`detach` for a tensor without gradient; a layer of your own for more",
        words=frozenset(
            """
            autograd backward detach_copy enable_grad func grad_dtype grad_fn inference_mode is_grad_enabled
            is_inference is_inference_mode_enabled is_leaf no_grad output_nr register_hook
            register_post_accumulate_grad_hook requires_grad retain_grad retains_grad set_grad_enabled vmap volatile
            """.split()
        ),
        instead={"data": "`detach()`", "grad": "a term of the objective, which may take gradients"},
    ),
    Reason(
        title="Devices",
        why="moves a tensor, and where the network runs is the run's decision",
        expected="`to(other)`, or `device=x.device`",
        words=frozenset("cpu cuda get_device get_device_module hpu is_cpu is_cuda is_xpu xpu".split()),
    ),
    Reason(
        title="Functions that take functions",
        why="takes a function, and a program has none to give",
        expected="a loop, or a function listed under `functions`",
        words=frozenset("apply_ compile cond map_ map2_ while_loop".split()),
    ),
    Reason(
        title="Files, code and global state",
        why="reaches out of the network",
        expected="a layer, or a function listed under `functions`",
        words=frozenset(
            """
            classes distributed export fork get_file_path get_float32_matmul_precision get_num_interop_threads
            get_num_threads get_rng_state hub init_num_threads initial_seed jit library load manual_seed
            merge_type_from_type_comment module_load multiprocessing ops prepare_multiprocessing_environment
            profiler_allow_cudagraph_cupti_lazy_reinit_cuda12 reinforce save seed set_float32_matmul_precision
            set_flush_denormal set_num_interop_threads set_num_threads set_rng_state set_warn_always
            thread_safe_generator unify_type_list utils wait
            """.split()
        ),
        pattern=re.compile(
            r"jiterator_\w+|(get|set)_(deterministic|default|printoptions)\w*|\w*deterministic\w*|\w*autocast\w*|\w*anomaly\w*"
            r"|import_ir\w*|parse_\w+|sym_\w+|\w*torch_function\w*|boolean_dispatch|classproperty"
        ),
    ),
    Reason(
        title="Answers about types",
        why="answers with a bool or a type, which a program cannot branch on while the network runs",
        expected="a constant, or `training`",
        words=frozenset(
            """
            can_cast compiled_with_cxx11_abi cudnn_is_acceptable is_conj is_neg is_quantized is_signed is_tensor
            is_warn_always_enabled typename
            """.split()
        ),
    ),
    Reason(
        title="Python's own operators",
        why="is the inner form of an operator",
        expected="its sign, such as `a + b` or `x[0]`",
        pattern=re.compile(r"__\w+__"),
    ),
    Reason(
        title="The internal forms of operators",
        why="is an internal form of another operator",
        expected="the public operator",
        words=frozenset(
            """
            affine_grid_generator assert_int_or_pair choose_qparams_optimized convolution dequantize
            fused_moving_avg_obs_fake_quant grouped_mm int_repr lobpcg max_pool2d_with_indices_backward
            native_channel_shuffle native_dropout_backward native_norm norm_except_dim qscheme scaled_grouped_mm
            scaled_mm segment_reduce select_copy split_copy sym_constrain_range sym_constrain_range_for_size unique_dim
            unsafe_split_with_sizes view_as_complex_copy view_as_real_copy
            """.split()
        ),
        pattern=re.compile(
            r"(cudnn|miopen|mkldnn|quantized|fbgemm|quantize|fake_quantize|q)_\w+|batch_norm_(backward|elemt|gather|stats"
            r"|update)\w*|\w+_with_indices|_\w+"
        ),
        instead={
            "grid_sampler": "`grid_sample`",
            "frobenius_norm": "`linalg.matrix_norm`",
            "nuclear_norm": "`linalg.matrix_norm`",
            "range": "`arange`",
            "native_batch_norm": "`batch_norm`",
            "native_dropout": "`dropout`",
            "feature_dropout": "`dropout2d`",
            "eig": "`linalg.eig`",
            "solve": "`linalg.solve`",
            "lstsq": "`linalg.lstsq`",
            "matrix_rank": "`linalg.matrix_rank`",
            "symeig": "`linalg.eigh`",
            "index": "`x[...]`",
            "slice": "`x[start:stop]`",
        },
    ),
    Reason(
        title="Classes",
        why="is a class of torch's own",
        expected="a listed function, such as `tensor`",
        pattern=re.compile(r"\w*(Tensor|Storage|Stream|Event)|Size|Generator|Tag"),
    ),
    Reason(
        title="Layers",
        why="is a layer, whose weights belong to `layers`",
        expected="an entry of `layers`, such as torch.nn.LSTM",
        words=frozenset("gru gru_cell lstm lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell nn".split()),
        pattern=re.compile(r"[A-Z]\w*[a-z]\w*"),
    ),
)


def reason_of(name: str) -> Reason | None:
    """Why a name of torch is left out; None for one that is listed, or that has no reason of its own."""
    exact = (one for one in REASONS if name in one.words or name in one.instead)
    return next(exact, None) or next((one for one in REASONS if one.holds(name)), None)


def hint(name: str, known: Set[str]) -> tuple[str, str] | None:
    """Why a name is left out and what to write, for a message; None where it may be a misspelling.

    known: the names that are listed at its place.
    """
    reason = reason_of(name)
    if reason is None:
        return _elsewhere(name, known)
    pure = name.rstrip("_")
    if reason.pattern is IN_PLACE and name not in reason.instead and pure in known:
        return reason.why, f"`{pure}`, whose result is a new tensor"
    return reason.why, reason.instead.get(name, reason.expected)


def _elsewhere(name: str, known: Set[str]) -> tuple[str, str] | None:
    """A name that is listed, though not at this place: a function as a method, an attribute as a function."""
    if name in vocabulary.ATTRIBUTES and name not in known:
        return "is an attribute of a tensor", f"`x.{name}`"
    if name in vocabulary.FUNCTIONS and name not in known:
        return f"is a function of {vocabulary.home_of(name)}", f"`{name}(x)`"
    if name in vocabulary.METHODS and name not in known:
        return "is a method of a tensor", f"`x.{name}()`"
    return None
