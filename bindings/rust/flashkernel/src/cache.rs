//! Sequences of keys and values in pages, and attention over them.
use crate::element::DType;
use crate::error::{check, Error, Result};
use crate::ops::AttentionOptions;
use crate::tensor::{View, ViewMut};
use flashkernel_sys as sys;
use std::mem::{size_of, MaybeUninit};
use std::ptr::{null, null_mut};

/// The pages of a cache.
#[derive(Clone, Copy, Debug)]
pub struct PagePoolOptions {
    pub num_pages: usize,
    pub heads_kv: usize,
    pub head_dim: usize,
    /// Tokens of a page: 16, 32, 64, 128 or 256.
    pub page_size: usize,
    pub num_layers: usize,
    pub dtype: DType,
}

/// A sequence of one cache. One that was freed, or is another cache's, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence(sys::fk_sequence);

/// Pages on the host and the sequences in them. Both are given back when it is dropped.
///
/// What writes pages takes `&mut self`, so that no other thread reads them meanwhile.
pub struct KvCache {
    pool: *mut sys::fk_kv_page_pool,
    cache: *mut sys::fk_kv_cache,
}

// The library lets any thread use a handle. Calls that write pages or sequences need `&mut self`.
unsafe impl Send for KvCache {}
unsafe impl Sync for KvCache {}

impl Drop for KvCache {
    fn drop(&mut self) {
        // Safe: both handles are this cache's own, and null is taken.
        unsafe {
            sys::fk_kv_cache_destroy(self.cache);
            sys::fk_kv_page_pool_destroy(self.pool);
        }
    }
}

fn count(name: &str, value: usize) -> Result<i64> {
    i64::try_from(value).map_err(|_| Error::invalid(format!("KvCache: {name} is {value}; at most 2^63 - 1")))
}

impl KvCache {
    pub fn new(options: &PagePoolOptions) -> Result<Self> {
        let mut c = MaybeUninit::<sys::fk_kv_page_pool_options>::uninit();
        // Safe: the struct is written where the call succeeds.
        check(unsafe {
            sys::fk_kv_page_pool_options_init(c.as_mut_ptr(), size_of::<sys::fk_kv_page_pool_options>())
        })?;
        let mut c = unsafe { c.assume_init() };
        c.num_pages = count("num_pages", options.num_pages)?;
        c.heads_kv = count("heads_kv", options.heads_kv)?;
        c.head_dim = count("head_dim", options.head_dim)?;
        c.page_size = count("page_size", options.page_size)?;
        c.num_layers = count("num_layers", options.num_layers)?;
        c.dtype = options.dtype.in_c();
        let mut made = KvCache { pool: null_mut(), cache: null_mut() };
        // Safe: each handle is written where its call succeeds, and dropped with `made`.
        check(unsafe { sys::fk_kv_page_pool_create(&c, null_mut(), &mut made.pool) })?;
        check(unsafe { sys::fk_kv_cache_create(made.pool, &mut made.cache) })?;
        Ok(made)
    }

    /// An empty sequence.
    pub fn create(&mut self) -> Result<Sequence> {
        let mut id = sys::fk_sequence { slot: 0, generation: 0, cache: 0 };
        check(unsafe { sys::fk_kv_cache_create_sequence(self.cache, null(), 0, &mut id, null_mut()) })?;
        Ok(Sequence(id))
    }

    /// A second sequence that shares every page until one of the two writes.
    pub fn fork(&mut self, sequence: Sequence) -> Result<Sequence> {
        let mut id = sequence.0;
        check(unsafe { sys::fk_kv_cache_fork(self.cache, sequence.0, &mut id) })?;
        Ok(Sequence(id))
    }

    /// Forgets the tokens from `length` on.
    pub fn truncate(&mut self, sequence: Sequence, length: usize) -> Result<()> {
        check(unsafe { sys::fk_kv_cache_truncate(self.cache, sequence.0, count("length", length)?) })
    }

    pub fn free(&mut self, sequence: Sequence) -> Result<()> {
        check(unsafe { sys::fk_kv_cache_free_sequence(self.cache, sequence.0) })
    }

    /// Tokens of a sequence.
    pub fn len(&self, sequence: Sequence) -> Result<usize> {
        let mut length = 0;
        check(unsafe { sys::fk_kv_cache_length(self.cache, sequence.0, &mut length) })?;
        Ok(length as usize)
    }

    pub fn num_free_pages(&self) -> usize {
        unsafe { sys::fk_kv_page_pool_num_free(self.pool) as usize }
    }

    /// Room for more tokens in all layers: their slots, for [`KvCache::write`].
    pub fn append(&mut self, sequence: Sequence, num_tokens: usize) -> Result<Vec<i64>> {
        let needed = count("num_tokens", num_tokens)?;
        let mut slots = vec![0i64; num_tokens];
        // Safe: `slots` has an entry a token.
        check(unsafe { sys::fk_kv_cache_append(self.cache, sequence.0, needed, null_mut(), slots.as_mut_ptr()) })?;
        Ok(slots)
    }

    fn pages(&self, layer: usize) -> Result<(sys::fk_tensor, sys::fk_tensor)> {
        let layer = count("layer", layer)?;
        let (mut k, mut v) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // Safe: each tensor is written where its call succeeds.
        check(unsafe { sys::fk_kv_page_pool_k_pages(self.pool, layer, k.as_mut_ptr()) })?;
        check(unsafe { sys::fk_kv_page_pool_v_pages(self.pool, layer, v.as_mut_ptr()) })?;
        Ok(unsafe { (k.assume_init(), v.assume_init()) })
    }

    /// Writes keys and values [tokens, heads_kv, head_dim] of one layer to slots that `append` gave.
    pub fn write(&mut self, layer: usize, slots: &[i64], k: &View<'_>, v: &View<'_>) -> Result<()> {
        let (k_pages, v_pages) = self.pages(layer)?;
        let slots = View::new(slots, &[slots.len()])?;
        // Safe: the library refuses slots outside of the pool.
        check(unsafe { sys::fk_kv_append(&k.raw, &v.raw, &k_pages, &v_pages, null(), &slots.raw, null(), null()) })
    }

    /// Attention of q [sequences, heads_q, seq_q, head_dim] over the tokens of each sequence; out as q.
    pub fn attention(
        &self,
        layer: usize,
        sequences: &[Sequence],
        q: &View<'_>,
        options: &AttentionOptions<'_>,
        out: &mut ViewMut<'_>,
    ) -> Result<()> {
        let ids: Vec<sys::fk_sequence> = sequences.iter().map(|sequence| sequence.0).collect();
        let mut max_pages = 1;
        for id in &ids {
            let mut pages = 0;
            check(unsafe { sys::fk_kv_cache_num_pages(self.cache, *id, &mut pages) })?;
            max_pages = max_pages.max(pages);
        }
        let (mut table, mut lengths) = (vec![0i32; ids.len() * max_pages as usize], vec![0i32; ids.len()]);
        // Safe: the arrays have room for max_pages entries a sequence, and one.
        check(unsafe {
            let (table, lengths) = (table.as_mut_ptr(), lengths.as_mut_ptr());
            sys::fk_kv_cache_block_table(self.cache, ids.as_ptr(), ids.len() as i64, max_pages, table, lengths)
        })?;
        let (k_pages, v_pages) = self.pages(layer)?;
        let table = View::new(&table, &[ids.len(), max_pages as usize])?;
        let lengths = View::new(&lengths, &[ids.len()])?;
        let seq_q = q.shape().get(2).copied().unwrap_or(0);
        let options = options.in_c()?;
        check(unsafe {
            sys::fk_attention_paged(
                &q.raw, &k_pages, &v_pages, &table.raw, &lengths.raw, null(), seq_q, &out.raw, null(), &options, null(),
            )
        })
    }
}
