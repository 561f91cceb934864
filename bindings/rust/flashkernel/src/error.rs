//! What went wrong, in the library's words.
use flashkernel_sys as sys;
use std::ffi::CStr;
use std::fmt;

/// The kind of a failure: the statuses of the C API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    InvalidArgument,
    BadBlockTable,
    Unsupported,
    OutOfMemory,
    /// The page pool ran dry; nothing has changed.
    OutOfPages,
    Cuda,
    Internal,
}

/// A failure: `message` is one sentence, "op: what was given; what is needed".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn invalid(message: String) -> Self {
        Error { kind: ErrorKind::InvalidArgument, message }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// The status of a call of this thread, with its message where it failed.
pub(crate) fn check(status: sys::fk_status) -> Result<()> {
    let kind = match status {
        sys::FK_OK => return Ok(()),
        sys::FK_INVALID_ARGUMENT => ErrorKind::InvalidArgument,
        sys::FK_BAD_BLOCK_TABLE => ErrorKind::BadBlockTable,
        sys::FK_UNSUPPORTED => ErrorKind::Unsupported,
        sys::FK_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        sys::FK_OUT_OF_PAGES => ErrorKind::OutOfPages,
        sys::FK_CUDA_ERROR => ErrorKind::Cuda,
        _ => ErrorKind::Internal,
    };
    // Safe: the string lives until this thread's next failure, and is copied here.
    let message = unsafe { CStr::from_ptr(sys::fk_last_error_message()) };
    Err(Error { kind, message: message.to_string_lossy().into_owned() })
}
