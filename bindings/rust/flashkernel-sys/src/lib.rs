//! The C API of FlashKernel, as it stands in `flashkernel.h`, which says what each function does. The crate
//! `flashkernel` is the safe way to it.
#![no_std]
#![allow(non_camel_case_types)]

use core::ffi::c_void;
use core::marker::PhantomData;

/// C's `char` has a sign on some systems and none on others.
#[cfg(any(target_arch = "aarch64", target_arch = "arm", target_arch = "riscv64", target_arch = "powerpc64"))]
#[allow(non_camel_case_types)]
pub type c_char = u8;
#[cfg(not(any(target_arch = "aarch64", target_arch = "arm", target_arch = "riscv64", target_arch = "powerpc64")))]
#[allow(non_camel_case_types)]
pub type c_char = i8;

include!("ffi.rs");
