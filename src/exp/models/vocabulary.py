"""The lists of functions, methods, attributes and dtypes that forward programs may use.

This module does not import torch.

A program cannot use functions, methods or attributes that are not on the lists. The lists contain operators that take
tensors and numbers and return new tensors, with their documented aliases. The lists were made from torch's own database
(torch.testing._internal.opinfo). tests/models/operators.py compares the lists with torch.
"""
# ruff: noqa: SIM905  (lists of words are easier to read as text)

from __future__ import annotations

from collections.abc import Set

from exp.spelling import habits

# Functions of torch, which a program writes as `relu(x)` or `torch.relu(x)`.
TORCH_FUNCTIONS = frozenset(
    """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all amax amin aminmax angle any
    arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_tensor asin asinh
    atan atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bartlett_window bernoulli bincount binomial
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
    bmm broadcast_shapes broadcast_tensors broadcast_to bucketize cartesian_prod cat cdist ceil chain_matmul
    cholesky cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip clone column_stack combinations
    complex concat concatenate conj conj_physical constant_pad_nd copysign corrcoef cos cosh count_nonzero cov cross
    cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach diag diag_embed diagflat diagonal
    diagonal_scatter diff digamma dist div divide dot dsplit dstack einsum eq erf erfc erfinv exp exp2 expm1 eye
    fill fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin fmod frac frexp full
    full_like gather gcd ge geqrf ger gradient greater greater_equal gt hamming_window hann_window heaviside histc
    histogram histogramdd hsplit hstack hypot i0 igamma igammac imag index_add index_copy index_fill index_put
    index_reduce index_select inner inverse is_complex is_floating_point isclose isfinite isin isinf isnan isneginf
    isposinf isreal istft kaiser_window kron kthvalue lcm ldexp le lerp less less_equal lgamma linspace log log10
    log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor
    logit logspace logsumexp lt lu lu_solve lu_unpack masked_fill masked_scatter masked_select matmul matrix_exp
    matrix_power max maximum mean median meshgrid min minimum mm mode moveaxis movedim msort mul multinomial
    multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg negative nextafter nonzero
    nonzero_static norm normal not_equal numel ones ones_like orgqr ormqr outer pca_lowrank permute pinverse poisson
    polar polygamma positive pow prod promote_types put qr quantile rad2deg rand rand_like randint randint_like
    randn randn_like randperm ravel real reciprocal relu remainder renorm repeat_interleave reshape resolve_conj
    resolve_neg result_type roll rot90 round row_stack rsqrt rsub scalar_tensor scatter scatter_add scatter_reduce
    searchsorted select select_scatter selu sgn sigmoid sign signbit sin sinc sinh slice_scatter slogdet softmax
    sort split split_with_sizes sqrt square squeeze stack std std_mean stft sub subtract sum svd svd_lowrank
    swapaxes swapdims t take take_along_dim tan tanh tensor tensor_split tensordot tile topk trace transpose
    trapezoid trapz triangular_solve tril tril_indices triu triu_indices true_divide trunc unbind unflatten unique
    unique_consecutive unravel_index unsqueeze vander var var_mean vdot view_as_complex view_as_real vsplit vstack
    where xlogy zeros zeros_like
    """.split()
)

# Functions of torch.nn.functional, which a program writes as `gelu(x)`, `F.gelu(x)` or `torch.nn.functional.gelu(x)`.
FUNCTIONAL_FUNCTIONS = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d affine_grid alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear
    binary_cross_entropy binary_cross_entropy_with_logits celu channel_shuffle conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity cross_entropy
    ctc_loss dropout dropout1d dropout2d dropout3d elu embedding embedding_bag feature_alpha_dropout fold
    fractional_max_pool2d fractional_max_pool3d gaussian_nll_loss gelu glu grid_sample group_norm gumbel_softmax
    hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div
    l1_loss layer_norm leaky_relu linear linear_cross_entropy local_response_norm log_softmax logsigmoid lp_pool1d
    lp_pool2d lp_pool3d margin_ranking_loss max_pool1d max_pool2d max_pool3d max_unpool1d max_unpool2d max_unpool3d
    mish mse_loss multi_head_attention_forward multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
    nll_loss normalize one_hot pad pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu
    relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax
    softmin softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss
    triplet_margin_with_distance_loss unfold upsample upsample_bilinear upsample_nearest
    """.split()
)
LINALG_FUNCTIONS = frozenset(
    """
    cholesky cholesky_ex cond cross det diagonal eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor
    ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matmul matrix_exp matrix_norm matrix_power
    matrix_rank multi_dot norm pinv qr slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve
    vander vecdot vector_norm
    """.split()
)
FFT_FUNCTIONS = frozenset(
    """
    fft fft2 fftfreq fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft irfft2
    irfftn rfft rfft2 rfftfreq rfftn
    """.split()
)
# Functions that drop values even in evaluation, unless a program calls them with `training=training`.
NEEDS_TRAINING = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "multi_head_attention_forward"})

# Functions that write into an argument. A value has three entries: the argument, the parameter that enables writing,
# and the default of this parameter. The function writes if the argument is given and the parameter is true. None
# instead of a parameter: the function always writes.
WRITES = {
    "batch_norm": ("running_mean", "training", False),
    "instance_norm": ("running_mean", "use_input_stats", True),
    "embedding": ("max_norm", None, True),
    "embedding_bag": ("max_norm", None, True),
}

# Python's functions, for values that are known before the run. On a tensor, names such as `max` and `sum` call the
# functions of torch.
BUILTINS = frozenset(
    "abs bool dict enumerate float int len list max min range reversed round str sum tuple zip".split()
)
MATHEMATICS = frozenset(
    """
    acos asin atan atan2 ceil cos cosh degrees e erf exp expm1 fabs floor fmod hypot inf log log10 log1p log2 nan pi
    pow radians sin sinh sqrt tan tanh tau trunc
    """.split()
)
# Names in math and in torch that are numbers.
NUMBERS = frozenset({"e", "inf", "nan", "pi", "tau"})
TORCH_NUMBERS = NUMBERS - {"tau"}

# Functions of torch that are not methods of a tensor. The other functions in TORCH_FUNCTIONS are also methods.
_NO_METHODS = frozenset(
    """
    arange as_tensor atleast_1d atleast_2d atleast_3d bartlett_window binomial blackman_window block_diag
    broadcast_shapes broadcast_tensors bucketize cartesian_prod cat cdist chain_matmul column_stack combinations
    complex concat concatenate constant_pad_nd cumulative_trapezoid dstack einsum eye fill full full_like gradient
    hamming_window hann_window histogramdd hstack imag isin kaiser_window linspace logspace lu_unpack meshgrid
    normal ones ones_like pca_lowrank poisson polar promote_types rand rand_like randint randint_like randn
    randn_like randperm real result_type row_stack rsub scalar_tensor searchsorted selu stack std_mean svd_lowrank
    tensor tensordot trapezoid trapz tril_indices triu_indices unravel_index vander var_mean view_as_complex
    view_as_real vstack zeros zeros_like
    """.split()
)
METHODS = (TORCH_FUNCTIONS - _NO_METHODS) | frozenset(
    """
    bfloat16 bool byte cdouble cfloat chalf char contiguous dim double element_size expand expand_as float half
    hardshrink int is_contiguous long ndimension nelement new_full new_ones new_tensor new_zeros prelu repeat
    reshape_as short size stride sum_to_size to to_dense to_sparse type type_as unfold view view_as
    """.split()
)
CONTAINER_METHODS = frozenset({"append", "items", "keys", "values"})

ATTRIBUTES = frozenset({"H", "T", "device", "dtype", "imag", "mH", "mT", "ndim", "real", "shape"})
# Fields of the named tuples that max, sort, topk and functions of torch.linalg return.
RESULTS = frozenset(
    """
    L LD LU Q R S U V Vh bin_edges eigenvalues eigenvectors exponent hist indices info inverse logabsdet mantissa
    pivots rank residuals sign singular_values solution values
    """.split()
)
PARAMETER_ATTRIBUTES = frozenset({"bias", "weight"})

DTYPES = frozenset(
    """
    bfloat16 bool cdouble cfloat chalf complex128 complex32 complex64 double float float16 float32 float64 half int
    int16 int32 int64 int8 long short uint16 uint32 uint64 uint8
    """.split()
)
MEMORY_FORMATS = frozenset("channels_last channels_last_3d contiguous_format preserve_format".split())

# The module that each prefix of a name in a program means.
PREFIXES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "functional": "torch.nn.functional",
    "nn.functional": "torch.nn.functional",
    "torch.nn.functional": "torch.nn.functional",
    "math": "math",
    **{spelling: f"torch.{name}" for name in ("fft", "linalg") for spelling in (name, f"torch.{name}")},
}
_MEMBERS = {
    "torch": TORCH_FUNCTIONS | DTYPES | MEMORY_FORMATS | TORCH_NUMBERS,
    "torch.nn.functional": FUNCTIONAL_FUNCTIONS,
    "torch.fft": FFT_FUNCTIONS,
    "torch.linalg": LINALG_FUNCTIONS,
    "math": MATHEMATICS,
}

FUNCTIONS = TORCH_FUNCTIONS | FUNCTIONAL_FUNCTIONS


def members(prefix: str) -> frozenset[str]:
    """Return the functions and values that a program may write after a prefix in PREFIXES."""
    return _MEMBERS[PREFIXES[prefix]]


def is_value(name: str, home: str) -> bool:
    """Return whether a name in a module is a value instead of a function: a number, a dtype or a memory format."""
    if home == "torch":
        return name in DTYPES | MEMORY_FORMATS | TORCH_NUMBERS
    return home == "math" and name in NUMBERS


def home_of(name: str) -> str:
    """Return the module of a function that a program writes without a prefix.

    The module is torch if torch has the function, otherwise torch.nn.functional.
    """
    return "torch" if name in TORCH_FUNCTIONS else "torch.nn.functional"


def hint(name: str, known: Set[str]) -> tuple[str, str] | None:
    """Return the reason why a program cannot use a name, and an alternative.

    Args:
        name: The name.
        known: The names that are allowed at this position.

    Returns:
        The reason and the alternative. None: the name may be misspelled.
    """
    pure, instead = name.rstrip("_"), habits()["torch"]
    if name in instead:
        return "is not supported in a program", instead[name]
    if name != pure and not name.startswith("_") and pure in known:
        return "writes into its tensor, to which other variables may refer", f"`{pure}`, which returns a new tensor"
    if name in ATTRIBUTES and name not in known:
        return "is an attribute of a tensor", f"`x.{name}`"
    if name in FUNCTIONS and name not in known:
        return f"is a function of {home_of(name)}", f"`{name}(x)`"
    if name in METHODS and name not in known:
        return "is a method of a tensor", f"`x.{name}()`"
    if name[:1].isupper():
        return "is a class", "an entry of `layers`, such as torch.nn.Linear"
    return None
