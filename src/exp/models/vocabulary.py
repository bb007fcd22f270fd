"""What a forward program may name: the closed lists of functions, methods, attributes and dtypes. Imports no torch.

A name that is not here cannot be reached from a program. Left out on purpose: whatever writes in place (`add_`,
`out=`), whatever reads a value back to Python (`item`, `tolist`, `numpy`), files, storage, hooks and `data` and `grad`.
"""
# ruff: noqa: SIM905  (lists of words are read more easily as words)

from __future__ import annotations

# Names of torch itself; written `relu(x)` or `torch.relu(x)`.
TORCH_FUNCTIONS = frozenset(
    """
    abs acos add addmm all amax amin any arange argmax argmin argsort asin atan atan2 baddbmm bernoulli bmm
    broadcast_to bucketize cat cdist ceil chunk clamp clone column_stack concat cos cosh count_nonzero cross cummax
    cumprod cumsum deg2rad diag diag_embed diagonal diff div dot dstack einsum empty_like eq erf erfc exp expm1 eye
    flatten flip floor floor_divide fmod full full_like gather ge gt hstack hypot index_select inner
    isfinite isinf isnan le lerp linspace log log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and
    logical_not logical_or logical_xor logit logsumexp lt masked_fill matmul max maximum mean median
    meshgrid min minimum mm movedim mul mv nan_to_num narrow ne neg norm normal ones ones_like outer
    permute pow prod quantile rand rand_like randn randn_like reciprocal relu remainder repeat_interleave reshape
    roll round rsqrt rsub scatter scatter_add searchsorted selu sigmoid sign sin sinh softmax sort split sqrt square
    squeeze stack std sub sum swapaxes t take_along_dim tan tanh tensordot tile topk trace transpose tril triu trunc
    unbind unflatten unsqueeze var var_mean vstack where zeros zeros_like
    """.split()
)

# Names of torch.nn.functional; written `gelu(x)`, `F.gelu(x)` or `torch.nn.functional.gelu(x)`.
FUNCTIONAL_FUNCTIONS = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    alpha_dropout avg_pool1d avg_pool2d avg_pool3d bilinear celu conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d cosine_similarity dropout dropout1d dropout2d dropout3d elu embedding fold gelu
    glu group_norm grid_sample affine_grid gumbel_softmax hardshrink hardsigmoid hardswish hardtanh interpolate
    layer_norm leaky_relu linear log_softmax logsigmoid lp_pool1d lp_pool2d max_pool1d max_pool2d max_pool3d mish
    normalize one_hot pad pairwise_distance pixel_shuffle pixel_unshuffle prelu relu relu6 rms_norm rrelu
    scaled_dot_product_attention selu sigmoid silu softmax softmin softplus softshrink softsign tanh tanhshrink
    threshold unfold
    """.split()
)

# torch.nn.functional.dropout drops in evaluation, too, unless it is told: a program has to say `training=training`.
NEEDS_TRAINING = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d"})

# Python's own functions, on what is known before the run; with a tensor, `max`, `sum` and the like are torch's.
BUILTINS = frozenset(
    "abs bool dict enumerate float int len list max min range reversed round str sum tuple zip".split()
)
MATHEMATICS = frozenset("ceil cos e exp floor inf log log2 pi sin sqrt tanh".split())
NUMBERS = frozenset({"e", "inf", "pi"})

METHODS = frozenset(
    """
    abs add all amax amin any argmax argmin argsort bfloat16 bmm bool broadcast_to ceil chunk clamp clone contiguous
    cos cumprod cumsum detach diag diagonal diff dim div double eq exp expand expand_as flatten flip float floor
    gather ge gt half index_select int isfinite isinf isnan le lerp log log1p log_softmax logical_and logical_not
    logical_or logsumexp long lt masked_fill matmul max maximum mean median min minimum mm movedim mul narrow ne neg
    new_full new_ones new_zeros norm numel permute pow prod reciprocal relu repeat repeat_interleave reshape roll
    round rsqrt scatter scatter_add sigmoid sign sin size softmax sort split sqrt square squeeze std sub sum swapaxes
    t take_along_dim tanh tile to topk transpose tril triu trunc type_as unbind unflatten unfold unsqueeze var view
    view_as where
    """.split()
)
CONTAINER_METHODS = frozenset({"append", "items", "keys", "values"})

ATTRIBUTES = frozenset({"H", "T", "device", "dtype", "imag", "mH", "mT", "ndim", "real", "shape"})
PARAMETER_ATTRIBUTES = frozenset({"bias", "weight"})

DTYPES = frozenset("bfloat16 bool float16 float32 float64 int16 int32 int64 int8 uint8".split())

# Spelled-out module prefixes, and where they lead.
PREFIXES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "nn.functional": "torch.nn.functional",
    "torch.nn.functional": "torch.nn.functional",
    "math": "math",
}

FUNCTIONS = TORCH_FUNCTIONS | FUNCTIONAL_FUNCTIONS


def members(prefix: str) -> frozenset[str]:
    """The names that may follow a prefix of PREFIXES."""
    home = PREFIXES[prefix]
    if home == "torch":
        return TORCH_FUNCTIONS | DTYPES
    return FUNCTIONAL_FUNCTIONS if home == "torch.nn.functional" else MATHEMATICS


def home_of(name: str) -> str:
    """The module that a bare function name is taken from; torch's before torch.nn.functional's."""
    return "torch" if name in TORCH_FUNCTIONS else "torch.nn.functional"
