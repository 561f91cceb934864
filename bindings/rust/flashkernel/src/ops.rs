//! Ops on borrowed tensors. Shapes and dtypes are those of the functions of the same name in `flashkernel_ops.h`.
use crate::error::{check, Error, Result};
use crate::tensor::{optional, optional_mut, View, ViewMut};
use flashkernel_sys as sys;
use std::ffi::{CStr, CString};
use std::ptr::null;

/// The version of the library that this program is linked with: "0.1.0".
pub fn version() -> &'static str {
    // Safe: the string lives as long as the process.
    unsafe { CStr::from_ptr(sys::fk_version()) }.to_str().unwrap_or("")
}

/// Threads that kernels use, the caller's included.
pub fn num_threads() -> usize {
    unsafe { sys::fk_num_threads() as usize }
}

/// Process-wide; takes effect at the next op. `count` is at least 1.
pub fn set_num_threads(count: usize) -> Result<()> {
    check(unsafe { sys::fk_set_num_threads(i32::try_from(count).unwrap_or(i32::MAX)) })
}

/// Restricts the choice of kernels, process-wide: "attention_fwd/cpu/scalar"; "" frees it.
pub fn force_kernels(patterns: &str) -> Result<()> {
    let text = CString::new(patterns).map_err(|_| Error::invalid("force_kernels: the patterns have a NUL byte".into()))?;
    check(unsafe { sys::fk_force_kernels(text.as_ptr()) })
}

// Below, each call is safe for the same reason: views keep their slices borrowed while it runs, a `ViewMut` is the only
// view of its slice, and the library reads and writes nothing but what the views describe.

/// out = a + b, same shape; f32, F16 or Bf16.
pub fn add(a: &View<'_>, b: &View<'_>, out: &mut ViewMut<'_>) -> Result<()> {
    check(unsafe { sys::fk_add(&a.raw, &b.raw, &out.raw, null()) })
}

/// out = silu(gate) * up, same shape.
pub fn swiglu(gate: &View<'_>, up: &View<'_>, out: &mut ViewMut<'_>) -> Result<()> {
    check(unsafe { sys::fk_swiglu(&gate.raw, &up.raw, &out.raw, null()) })
}

/// Softmax along `axis`; a negative one counts from the end.
pub fn softmax(x: &View<'_>, out: &mut ViewMut<'_>, axis: i32) -> Result<()> {
    check(unsafe { sys::fk_softmax(&x.raw, &out.raw, axis, null()) })
}

/// The logarithm of [`softmax`].
pub fn log_softmax(x: &View<'_>, out: &mut ViewMut<'_>, axis: i32) -> Result<()> {
    check(unsafe { sys::fk_log_softmax(&x.raw, &out.raw, axis, null()) })
}

/// out = x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich, 2019).
pub fn rms_norm(x: &View<'_>, weight: Option<&View<'_>>, eps: f32, out: &mut ViewMut<'_>) -> Result<()> {
    check(unsafe { sys::fk_rms_norm(&x.raw, null(), optional(weight), &out.raw, null(), eps, null()) })
}

/// out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dim.
pub fn layer_norm(
    x: &View<'_>,
    weight: Option<&View<'_>>,
    bias: Option<&View<'_>>,
    eps: f32,
    out: &mut ViewMut<'_>,
) -> Result<()> {
    check(unsafe {
        sys::fk_layer_norm(&x.raw, null(), optional(weight), optional(bias), &out.raw, null(), eps, null())
    })
}

/// What [`linear`] applies to its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    None,
    GeluTanh,
    Gelu,
    Silu,
}

/// out = activation(x weight^T + bias): x [..., in], weight [out, in], bias [out].
pub fn linear(
    x: &View<'_>,
    weight: &View<'_>,
    bias: Option<&View<'_>>,
    activation: Activation,
    out: &mut ViewMut<'_>,
) -> Result<()> {
    let activation = match activation {
        Activation::None => sys::FK_ACTIVATION_NONE,
        Activation::GeluTanh => sys::FK_ACTIVATION_GELU_TANH,
        Activation::Gelu => sys::FK_ACTIVATION_GELU,
        Activation::Silu => sys::FK_ACTIVATION_SILU,
    };
    check(unsafe { sys::fk_linear(&x.raw, &weight.raw, optional(bias), &out.raw, null(), activation, null()) })
}

/// What ALiBi's slopes are multiplied with, where d = i + seq_k - seq_q - j is the way from key j to query i's position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alibi {
    /// |d|
    #[default]
    Distance,
    /// d, which is negative to the right of the position
    Signed,
    /// sqrt(d) for keys before the position, 0 for others
    Sqrt,
}

/// Options of attention; the defaults are those of the library.
#[derive(Clone, Copy, Default)]
pub struct AttentionOptions<'a> {
    /// Aligned bottom-right: query i stands at position i + seq_k - seq_q.
    pub causal: bool,
    /// Keys seen to the left and to the right of a query's position; `None`: all.
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    /// c > 0: scores become c * tanh(score / c); 0: off.
    pub softcap: f32,
    /// `None`: 1 / sqrt(head_dim).
    pub scale: Option<f32>,
    /// Broadcastable to [batch, heads_q, seq_q, seq_k]; dense attention only.
    pub bias: Option<View<'a>>,
    /// The words of [`pack_mask`], i32, whose first dims are broadcastable to [batch, heads_q, seq_q]; dense attention, and
    /// over pages bits of the last seq_q keys.
    pub mask: Option<View<'a>>,
    /// f32 [heads_q] or [batch, heads_q].
    pub alibi_slopes: Option<View<'a>>,
    pub alibi: Alibi,
    /// f32 [heads_q]: logits of a key without a value.
    pub sinks: Option<View<'a>>,
    /// i32 or i64 [batch]: the first key of each sequence that is seen; paged attention only.
    pub k_starts: Option<View<'a>>,
    /// i32 or i64 [batch]: how many tokens at the start of each sequence count; variable lengths only.
    pub seqused_q: Option<View<'a>>,
    pub seqused_k: Option<View<'a>>,
    /// u8 [batch or 1, heads_q or 1, blocks of queries, blocks of keys]: 0 hides a block, 1 shows what `mask` shows, 2 shows
    /// all of it; dense attention only.
    pub block_mask: Option<View<'a>>,
    /// Queries and keys of a block, powers of two from 64 on; `None`: 128 by 128.
    pub block_size: Option<(usize, usize)>,
}

impl AttentionOptions<'_> {
    pub(crate) fn in_c(&self) -> Result<sys::fk_attention_options> {
        let mut c = std::mem::MaybeUninit::<sys::fk_attention_options>::uninit();
        // Safe: the struct is written where the call succeeds.
        check(unsafe { sys::fk_attention_options_init(c.as_mut_ptr(), std::mem::size_of::<sys::fk_attention_options>()) })?;
        let mut c = unsafe { c.assume_init() };
        let window = |keys: Option<usize>| keys.map_or(-1, |keys| i64::try_from(keys).unwrap_or(i64::MAX));
        c.causal = i32::from(self.causal);
        c.window_left = window(self.window_left);
        c.window_right = window(self.window_right);
        c.softcap = self.softcap;
        c.has_scale = i32::from(self.scale.is_some());
        c.scale = self.scale.unwrap_or(0.0);
        c.bias = optional(self.bias.as_ref());
        c.mask = optional(self.mask.as_ref());
        c.alibi_slopes = optional(self.alibi_slopes.as_ref());
        c.alibi = match self.alibi {
            Alibi::Distance => sys::FK_ALIBI_DISTANCE,
            Alibi::Signed => sys::FK_ALIBI_SIGNED,
            Alibi::Sqrt => sys::FK_ALIBI_SQRT,
        };
        c.sinks = optional(self.sinks.as_ref());
        c.k_starts = optional(self.k_starts.as_ref());
        c.seqused_q = optional(self.seqused_q.as_ref());
        c.seqused_k = optional(self.seqused_k.as_ref());
        c.block_mask = optional(self.block_mask.as_ref());
        if let Some((queries, keys)) = self.block_size {
            c.block_size_q = i64::try_from(queries).unwrap_or(i64::MAX);
            c.block_size_k = i64::try_from(keys).unwrap_or(i64::MAX);
        }
        Ok(c)
    }
}

/// A boolean mask as the bits that [`AttentionOptions::mask`] takes. mask: u8, not 0 is seen, of 1 to 4 dims; out: i32, of
/// mask's shape but for the last dim, which is (keys + 31) / 32. Bit j % 32 of word j / 32 is key j.
///
/// ```
/// use flashkernel::{pack_mask, View, ViewMut};
/// let mut words = [0i32; 2];
/// pack_mask(&View::new(&[1u8, 0, 1, 0, 1, 0], &[2, 3])?, &mut ViewMut::new(&mut words, &[2, 1])?)?;
/// assert_eq!(words, [0b101, 0b010]);
/// # Ok::<(), flashkernel::Error>(())
/// ```
pub fn pack_mask(mask: &View<'_>, out: &mut ViewMut<'_>) -> Result<()> {
    check(unsafe { sys::fk_pack_mask(&mask.raw, &out.raw, null()) })
}

/// softmax(scale q k^T) v: q [batch, heads_q, seq_q, head_dim], k and v [batch, heads_kv, seq_k, head_dim], out as q.
/// `lse`, where given, gets the logarithms of the denominators, f32 [batch, heads_q, seq_q].
///
/// ```
/// use flashkernel::{attention, AttentionOptions, View, ViewMut};
/// let (q, k) = ([1.0f32; 8], [0.5f32; 16]); // all keys are alike: the result is the mean of the values
/// let v: Vec<f32> = (0..16).map(|i| (i / 8) as f32).collect();
/// let mut out = [0.0f32; 8];
/// attention(
///     &View::new(&q, &[1, 1, 1, 8])?,
///     &View::new(&k, &[1, 1, 2, 8])?,
///     &View::new(&v, &[1, 1, 2, 8])?,
///     &AttentionOptions::default(),
///     &mut ViewMut::new(&mut out, &[1, 1, 1, 8])?,
///     None,
/// )?;
/// assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
/// # Ok::<(), flashkernel::Error>(())
/// ```
pub fn attention(
    q: &View<'_>,
    k: &View<'_>,
    v: &View<'_>,
    options: &AttentionOptions<'_>,
    out: &mut ViewMut<'_>,
    lse: Option<&mut ViewMut<'_>>,
) -> Result<()> {
    let options = options.in_c()?;
    check(unsafe { sys::fk_attention(&q.raw, &k.raw, &v.raw, &out.raw, optional_mut(lse), &options, null()) })
}
