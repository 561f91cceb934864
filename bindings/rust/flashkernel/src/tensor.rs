//! Borrowed tensors: a slice, a shape, and strides that stay inside of the slice.
use crate::element::Element;
use crate::error::{check, Error, Result};
use flashkernel_sys as sys;
use std::ffi::c_void;
use std::marker::PhantomData;

const CPU: sys::fk_device = sys::fk_device { type_: sys::FK_CPU, index: 0 };

/// A tensor that an op reads.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub(crate) raw: sys::fk_tensor,
    data: PhantomData<&'a [u8]>,
}

/// A tensor that an op writes. No other view of its slice can exist meanwhile.
pub struct ViewMut<'a> {
    pub(crate) raw: sys::fk_tensor,
    data: PhantomData<&'a mut [u8]>,
}

// A view is a slice, which may go to other threads as its elements may: they are numbers.
unsafe impl Send for View<'_> {}
unsafe impl Sync for View<'_> {}
unsafe impl Send for ViewMut<'_> {}
unsafe impl Sync for ViewMut<'_> {}

fn row_major<T: Element>(data: *mut c_void, len: usize, shape: &[usize]) -> Result<sys::fk_tensor> {
    let count = shape.iter().try_fold(1usize, |count, &extent| count.checked_mul(extent));
    if count != Some(len) {
        return Err(Error::invalid(format!("View: the slice has {len} elements; shape {shape:?} needs as many as it has")));
    }
    let extents: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect(); // a dim of a slice fits
    let mut raw = std::mem::MaybeUninit::<sys::fk_tensor>::uninit();
    let ndim = i32::try_from(extents.len()).unwrap_or(i32::MAX).min(sys::FK_MAX_DIMS + 1);
    // Safe: `extents` has `ndim` entries or more; the tensor is written where the call succeeds.
    check(unsafe { sys::fk_tensor_init(raw.as_mut_ptr(), data, T::DTYPE.in_c(), CPU, ndim, extents.as_ptr()) })?;
    Ok(unsafe { raw.assume_init() })
}

impl<'a> View<'a> {
    /// A row-major tensor: `data` has exactly the elements of `shape`; up to 8 dims.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Ok(View { raw: row_major::<T>(data.as_ptr() as *mut c_void, data.len(), shape)?, data: PhantomData })
    }

    /// A tensor with strides, in elements, which must not lead out of `data`. Element 0 is the first one of the slice.
    ///
    /// ```
    /// use flashkernel::View;
    /// let data = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    /// assert!(View::with_strides(&data, &[3, 2], &[1, 3]).is_ok()); // the transpose of [2, 3]
    /// assert!(View::with_strides(&data, &[3, 2], &[2, 3]).is_err());
    /// ```
    pub fn with_strides<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        let empty = shape.contains(&0);
        let last = shape.iter().zip(strides).try_fold(0usize, |last, (&extent, &stride)| {
            extent.saturating_sub(1).checked_mul(stride).and_then(|offset| last.checked_add(offset))
        });
        let inside = shape.len() == strides.len() && (empty || matches!(last, Some(last) if last < data.len()));
        if !inside || shape.len() > sys::FK_MAX_DIMS as usize {
            return Err(Error::invalid(format!(
                "View: shape {shape:?} with strides {strides:?} of {} elements; it must stay inside, with up to 8 dims",
                data.len()
            )));
        }
        let mut view = View::new(&data[..0], &[0])?;
        view.raw.data = data.as_ptr() as *mut c_void;
        view.raw.ndim = shape.len() as i32;
        for (d, (&extent, &stride)) in shape.iter().zip(strides).enumerate() {
            view.raw.shape[d] = i64::try_from(extent).unwrap_or(i64::MAX); // too large: the op refuses it
            view.raw.strides[d] = i64::try_from(stride).unwrap_or(i64::MAX);
        }
        Ok(view)
    }

    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.ndim as usize]
    }
}

impl<'a> ViewMut<'a> {
    /// A row-major tensor: `data` has exactly the elements of `shape`; up to 8 dims.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Ok(ViewMut { raw: row_major::<T>(data.as_mut_ptr() as *mut c_void, data.len(), shape)?, data: PhantomData })
    }

    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.ndim as usize]
    }
}

pub(crate) fn optional(view: Option<&View<'_>>) -> *const sys::fk_tensor {
    view.map_or(std::ptr::null(), |view| &view.raw)
}

pub(crate) fn optional_mut(view: Option<&mut ViewMut<'_>>) -> *const sys::fk_tensor {
    view.map_or(std::ptr::null(), |view| &view.raw)
}
