// GPT-2 (Radford et al., 2019) on flashkernel's ops: the weights of one checkpoint and greedy decoding over a paged
// cache. Used by main.cpp. Per layer: fused residual + LayerNorm, QKV linear, KV append, paged attention, output
// linear, fused residual + LayerNorm, linear + GELU in one kernel, linear.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_tensor.hpp"
#include "json.hpp"
#include "safetensors.hpp"

namespace gpt2 {

class Gpt2 {
 public:
  Gpt2(const std::string& directory, fk::DType dtype, fk::Device device) : dtype_(dtype), device_(device) {
    const Json config = Json::parse(read_file(directory + "/config.json"));
    if (config["model_type"].string() != "gpt2" || config["activation_function"].string() != "gelu_new")
      throw std::runtime_error(directory + "/config.json: a GPT-2 with activation gelu_new is needed");
    for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"})
      if (!config[key].is_null() && config[key].boolean()) throw std::runtime_error(std::string("config.json: ") + key);
    hidden_ = config["n_embd"].integer(), heads_ = config["n_head"].integer();
    const std::int64_t inner = config["n_inner"].is_null() ? 4 * hidden_ : config["n_inner"].integer();
    positions_ = config["n_positions"].integer(), vocab_ = config["vocab_size"].integer();
    eps_ = static_cast<float>(config["layer_norm_epsilon"].number());
    stop_ = config["eos_token_id"].is_null() ? -1 : config["eos_token_id"].integer();
    if (hidden_ < 1 || heads_ < 1 || hidden_ % heads_ != 0) throw std::runtime_error("config.json: n_embd, n_head");

    const Safetensors file(directory + "/model.safetensors");
    const std::string prefix = file.contains("transformer.wte.weight") ? "transformer." : "";
    const auto weight = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
      Tensor tensor = columns == 0 ? Tensor(dtype_, {rows}, device_) : Tensor(dtype_, {rows, columns}, device_);
      tensor.upload(file.read(prefix + name, columns == 0 ? Shape{rows} : Shape{rows, columns}, dtype_));
      return tensor;
    };
    // Hugging Face stores these [in, out]: linear takes the transposed view as it is.
    const auto transposed = [&](const std::string& name, std::int64_t in, std::int64_t out) {
      Tensor tensor = weight(name, in, out);
      tensor.view = tensor.view.transpose(0, 1);
      return tensor;
    };
    for (std::int64_t i = 0; i < config["n_layer"].integer(); ++i) {
      const std::string at = "h." + std::to_string(i) + ".";
      layers_.push_back(
          {weight(at + "ln_1.weight", hidden_, 0), weight(at + "ln_1.bias", hidden_, 0),
           transposed(at + "attn.c_attn.weight", hidden_, 3 * hidden_), weight(at + "attn.c_attn.bias", 3 * hidden_, 0),
           transposed(at + "attn.c_proj.weight", hidden_, hidden_), weight(at + "attn.c_proj.bias", hidden_, 0),
           weight(at + "ln_2.weight", hidden_, 0), weight(at + "ln_2.bias", hidden_, 0),
           transposed(at + "mlp.c_fc.weight", hidden_, inner), weight(at + "mlp.c_fc.bias", inner, 0),
           transposed(at + "mlp.c_proj.weight", inner, hidden_), weight(at + "mlp.c_proj.bias", hidden_, 0)});
    }
    norm_weight_ = weight("ln_f.weight", hidden_, 0), norm_bias_ = weight("ln_f.bias", hidden_, 0);
    head_ = weight("wte.weight", vocab_, hidden_);  // tied to the embedding
    // Embedding rows are looked up on the host: a few hundred bytes a token travel.
    token_rows_ = file.read(prefix + "wte.weight", {vocab_, hidden_}, dtype_);
    position_rows_ = file.read(prefix + "wpe.weight", {positions_, hidden_}, dtype_);
  }

  /// Greedy continuation of `prompt` by at most `max_new_tokens` ids; an end-of-text id is the last one.
  template <typename OnToken>
  std::vector<std::int32_t> generate(const std::vector<std::int32_t>& prompt, std::int64_t max_new_tokens,
                                     OnToken on_token) {
    const auto count = static_cast<std::int64_t>(prompt.size());
    if (count == 0) throw std::runtime_error("generate: the prompt has no tokens");
    if (max_new_tokens < 1 || count + max_new_tokens > positions_)
      throw std::runtime_error("generate: " + std::to_string(count) + " + " + std::to_string(max_new_tokens) +
                               " tokens; the model's context holds " + std::to_string(positions_));
    for (const std::int32_t id : prompt)
      if (id < 0 || id >= vocab_) throw std::runtime_error("generate: no token has the id " + std::to_string(id));
    fk::KvPagePoolOptions options;
    options.page_size = 64;
    options.num_pages = (count + max_new_tokens + options.page_size - 1) / options.page_size;
    options.heads_kv = heads_;
    options.head_dim = hidden_ / heads_;
    options.num_layers = static_cast<std::int64_t>(layers_.size());
    options.dtype = dtype_;
    options.device = device_;
    fk::KvPagePool pool(options);
    fk::KvCache cache(pool);
    const fk::SequenceId sequence = cache.create();
    std::vector<std::int32_t> generated, pending = prompt;
    while (static_cast<std::int64_t>(generated.size()) < max_new_tokens) {
      generated.push_back(forward(pending, cache, sequence));
      pending = {generated.back()};
      on_token(generated.back());
      if (generated.back() == stop_) break;
    }
    return generated;
  }

 private:
  using Shape = std::vector<std::int64_t>;
  struct Layer {
    Tensor ln_1_weight, ln_1_bias, attn_weight, attn_bias, attn_proj_weight, attn_proj_bias;
    Tensor ln_2_weight, ln_2_bias, fc_weight, fc_bias, fc_proj_weight, fc_proj_bias;
  };

  Tensor on_device(const std::vector<std::int32_t>& values) const {
    Tensor tensor(fk::DType::kInt32, {static_cast<std::int64_t>(values.size())}, device_);
    tensor.upload(values);
    return tensor;
  }

  Tensor rows_of(const std::vector<std::uint8_t>& table, const std::vector<std::int32_t>& rows) const {
    const std::size_t row_bytes = static_cast<std::size_t>(hidden_) * fk::dtype_bytes(dtype_);
    std::vector<std::uint8_t> gathered(rows.size() * row_bytes);
    for (std::size_t i = 0; i < rows.size(); ++i)
      std::memcpy(&gathered[i * row_bytes], &table[static_cast<std::size_t>(rows[i]) * row_bytes], row_bytes);
    Tensor tensor(dtype_, {static_cast<std::int64_t>(rows.size()), hidden_}, device_);
    tensor.upload(gathered);
    return tensor;
  }

  Tensor linear(const fk::TensorView& x, const Tensor& weight, const Tensor& bias,
                fk::Activation activation = fk::Activation::kNone) const {
    Tensor out(dtype_, {x.shape[0], weight.view.shape[0]}, device_);
    fk::linear(x, weight, bias, out, {}, activation);
    return out;
  }

  // residual += x, and the norm of that.
  Tensor norm(const fk::TensorView& x, const fk::TensorView& residual, const Tensor& weight, const Tensor& bias) const {
    Tensor out(dtype_, {x.shape[0], hidden_}, device_);
    fk::NormSaved saved;
    saved.residual_out = residual;
    fk::layer_norm(x, residual, weight, bias, out, saved, eps_);
    return out;
  }

  // Appends `tokens` to the sequence and returns the likeliest token after them.
  std::int32_t forward(const std::vector<std::int32_t>& tokens, fk::KvCache& cache, fk::SequenceId sequence) const {
    const auto count = static_cast<std::int64_t>(tokens.size());
    const std::int64_t head_dim = hidden_ / heads_, row = 3 * hidden_;
    const std::int64_t before = cache.length(sequence);
    std::vector<std::int32_t> positions(tokens.size());
    for (std::size_t i = 0; i < positions.size(); ++i)
      positions[i] = static_cast<std::int32_t>(before) + static_cast<std::int32_t>(i);
    std::vector<std::int64_t> slots(tokens.size());
    cache.append(sequence, count, slots.data());
    Tensor device_slots(fk::DType::kInt64, {count}, device_);
    device_slots.upload(slots);
    const std::int64_t pages = cache.num_pages(sequence);
    std::vector<std::int32_t> table(static_cast<std::size_t>(pages)), length(1);
    cache.block_table(&sequence, 1, pages, table.data(), length.data());
    Tensor device_table = on_device(table);
    device_table.view = {device_table.view.data, fk::DType::kInt32, {1, pages}, device_};
    const Tensor device_length = on_device(length), cu_seqlens = on_device({0, static_cast<std::int32_t>(count)});
    fk::AttentionOptions attention;
    attention.causal = true;

    const Tensor residual(dtype_, {count, hidden_}, device_);
    fk::add(rows_of(token_rows_, tokens), rows_of(position_rows_, positions), residual);
    Tensor x(dtype_, {count, hidden_}, device_);
    fk::layer_norm(residual, {}, layers_[0].ln_1_weight, layers_[0].ln_1_bias, x, {}, eps_);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      const Tensor qkv = linear(x, layer.attn_weight, layer.attn_bias);
      const auto part = [&](std::int64_t which) {
        void* data =
            static_cast<char*>(qkv.view.data) + which * hidden_ * static_cast<std::int64_t>(fk::dtype_bytes(dtype_));
        return fk::TensorView(data, dtype_, {count, heads_, head_dim}, {row, head_dim, 1}, device_);
      };
      const auto index = static_cast<std::int64_t>(i);
      fk::kv_append(part(1), part(2), cache.pool().k_pages(index), cache.pool().v_pages(index), device_slots);
      const Tensor heads(dtype_, {count, heads_, head_dim}, device_);
      fk::attention_paged(part(0), cache.pool().k_pages(index), cache.pool().v_pages(index), device_table,
                          device_length, cu_seqlens, count, heads, {}, attention);
      const fk::TensorView joined(heads.view.data, dtype_, {count, hidden_}, device_);
      x = norm(linear(joined, layer.attn_proj_weight, layer.attn_proj_bias), residual, layer.ln_2_weight,
               layer.ln_2_bias);
      x = linear(x, layer.fc_weight, layer.fc_bias, fk::Activation::kGeluTanh);
      x = linear(x, layer.fc_proj_weight, layer.fc_proj_bias);
      if (i + 1 < layers_.size()) x = norm(x, residual, layers_[i + 1].ln_1_weight, layers_[i + 1].ln_1_bias);
    }
    // Only the last row goes through the last norm and the output layer.
    const auto last = [&](const Tensor& rows) {
      char* data = static_cast<char*>(rows.view.data) +
                   (count - 1) * hidden_ * static_cast<std::int64_t>(fk::dtype_bytes(dtype_));
      return fk::TensorView(data, dtype_, {1, hidden_}, device_);
    };
    const Tensor logits = linear(norm(last(x), last(residual), norm_weight_, norm_bias_), head_, {});
    const Tensor best(fk::DType::kInt64, {1}, device_);
    fk::argmax(logits, best, 1u << 1);
    return static_cast<std::int32_t>(best.download<std::int64_t>()[0]);
  }

  fk::DType dtype_;
  fk::Device device_;
  std::int64_t hidden_ = 0, heads_ = 0, positions_ = 0, vocab_ = 0, stop_ = -1;
  float eps_ = 0;
  std::vector<Layer> layers_;
  Tensor norm_weight_, norm_bias_, head_;
  std::vector<std::uint8_t> token_rows_, position_rows_;
};

}  // namespace gpt2
