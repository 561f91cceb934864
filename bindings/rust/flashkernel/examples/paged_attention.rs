//! Attention over a paged KV-cache: a prompt, a fork of it, and the mean of values under equal keys.
use flashkernel::{AttentionOptions, DType, KvCache, PagePoolOptions, Result, View, ViewMut};

const HEADS: usize = 2;
const HEAD_DIM: usize = 16;

/// One token: keys that are all alike, and values that are all `value`.
fn append(cache: &mut KvCache, sequence: flashkernel::Sequence, value: f32) -> Result<()> {
    let (k, v) = ([0.5f32; HEADS * HEAD_DIM], [value; HEADS * HEAD_DIM]);
    let slots = cache.append(sequence, 1)?;
    let shape = [1, HEADS, HEAD_DIM];
    cache.write(0, &slots, &View::new(&k, &shape)?, &View::new(&v, &shape)?)
}

fn main() -> Result<()> {
    let options =
        PagePoolOptions { num_pages: 8, heads_kv: HEADS, head_dim: HEAD_DIM, page_size: 16, num_layers: 1, dtype: DType::Float32 };
    let mut cache = KvCache::new(&options)?;
    let first = cache.create()?;
    for token in 0..20 {
        append(&mut cache, first, token as f32)?;
    }
    let second = cache.fork(first)?;
    append(&mut cache, first, 31.0)?;
    append(&mut cache, second, 52.0)?;

    let q = [1.0f32; 2 * HEADS * HEAD_DIM];
    let mut out = [0.0f32; 2 * HEADS * HEAD_DIM];
    let shape = [2, HEADS, 1, HEAD_DIM];
    let mut out_view = ViewMut::new(&mut out, &shape)?;
    cache.attention(0, &[first, second], &View::new(&q, &shape)?, &AttentionOptions::default(), &mut out_view)?;
    for (b, last) in [31.0f32, 52.0].iter().enumerate() {
        let mean = (190.0 + last) / 21.0;
        assert!(out[b * HEADS * HEAD_DIM..(b + 1) * HEADS * HEAD_DIM].iter().all(|x| (x - mean).abs() < 1e-5), "{out:?}");
        println!("sequence {b}: {:.5}, the mean of its values", out[b * HEADS * HEAD_DIM]);
    }
    Ok(())
}
