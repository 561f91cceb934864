//! FlashKernel for Rust: attention over dense tensors and paged KV-caches, norms, linear layers, softmax.
//!
//! A [`View`] borrows a slice that an op reads, a [`ViewMut`] one that it writes; an op returns [`Error`] with the
//! library's own sentence where the arguments do not fit.
//!
//! ```
//! use flashkernel::{add, View, ViewMut};
//!
//! let (a, b) = ([1.0f32, 2.0, 3.0], [0.5f32, 0.5, 0.5]);
//! let mut out = [0.0f32; 3];
//! add(&View::new(&a, &[3])?, &View::new(&b, &[3])?, &mut ViewMut::new(&mut out, &[3])?)?;
//! assert_eq!(out, [1.5, 2.5, 3.5]);
//!
//! let refused = add(&View::new(&a, &[3])?, &View::new(&b[..2], &[2])?, &mut ViewMut::new(&mut out, &[3])?);
//! assert!(refused.unwrap_err().message.starts_with("add: b is float32[2]"));
//! # Ok::<(), flashkernel::Error>(())
//! ```
//!
//! What runs here is the CPU backend: the views are of the host's memory. `flashkernel_sys` has the C API with devices
//! and streams.

mod cache;
mod element;
mod error;
mod ops;
mod tensor;

pub use cache::{KvCache, PagePoolOptions, Sequence};
pub use element::{Bf16, DType, Element, F16};
pub use error::{Error, ErrorKind, Result};
pub use ops::{
    add, attention, force_kernels, layer_norm, linear, log_softmax, num_threads, pack_mask, rms_norm, set_num_threads,
    softmax, swiglu, version, Activation, Alibi, AttentionOptions,
};
pub use tensor::{View, ViewMut};
