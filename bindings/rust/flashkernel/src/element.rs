//! Element types. The 16-bit floats are newtypes over their bits; this crate converts them to and from f32.
use flashkernel_sys as sys;

/// Names of element types, as the C API numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    Float32,
    Float16,
    BFloat16,
    Int32,
    Int64,
    UInt8,
}

impl DType {
    pub(crate) fn in_c(self) -> sys::fk_dtype {
        match self {
            DType::Float32 => sys::FK_FLOAT32,
            DType::Float16 => sys::FK_FLOAT16,
            DType::BFloat16 => sys::FK_BFLOAT16,
            DType::Int32 => sys::FK_INT32,
            DType::Int64 => sys::FK_INT64,
            DType::UInt8 => sys::FK_UINT8,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A type that a tensor may have.
pub trait Element: Copy + sealed::Sealed + 'static {
    const DTYPE: DType;
}

macro_rules! element {
    ($($kind:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $kind {}
        impl Element for $kind {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
element!(f32 => Float32, F16 => Float16, Bf16 => BFloat16, i32 => Int32, i64 => Int64, u8 => UInt8);

/// The bits of an IEEE half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The bits of a bfloat16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl Bf16 {
    /// Rounds to nearest, ties to even.
    ///
    /// ```
    /// use flashkernel::Bf16;
    /// assert_eq!(Bf16::from_f32(1.0).0, 0x3f80);
    /// assert_eq!(Bf16::from_f32(1.00390625).to_f32(), 1.0); // half way: to even
    /// ```
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40); // stays a NaN
        }
        Bf16(((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }

    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

impl F16 {
    /// Rounds to nearest, ties to even; what is too large becomes infinite.
    ///
    /// ```
    /// use flashkernel::F16;
    /// assert_eq!(F16::from_f32(-2.0).0, 0xc000);
    /// assert_eq!(F16::from_f32(65504.0).to_f32(), 65504.0);
    /// assert!(F16::from_f32(65520.0).to_f32().is_infinite());
    /// ```
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = ((bits >> 16) & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        if magnitude > 0x7f80_0000 {
            return F16(sign | 0x7e00);
        }
        if magnitude >= 0x4780_0000 {
            return F16(sign | 0x7c00); // 65536 and more
        }
        if magnitude < 0x3880_0000 {
            // Below the least normal half: a multiple of 2^-24. The product is exact; rint rounds ties to even.
            let scaled = f32::from_bits(magnitude) * 16_777_216.0;
            let floor = scaled.floor();
            let up = scaled - floor > 0.5 || (scaled - floor == 0.5 && floor as u32 % 2 == 1);
            return F16(sign | (floor as u16 + u16::from(up)));
        }
        let rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
        F16(sign | ((rounded - 0x3800_0000) >> 13) as u16) // a carry out of the largest gives infinity
    }

    pub fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let magnitude = u32::from(self.0 & 0x7fff);
        let value = match magnitude {
            0x7c00..=0x7fff => f32::from_bits(0x7f80_0000 | (magnitude & 0x3ff) << 13),
            0x0400..=0x7bff => f32::from_bits((magnitude << 13) + 0x3800_0000),
            _ => magnitude as f32 / 16_777_216.0,
        };
        f32::from_bits(value.to_bits() | sign)
    }
}
