// Continues a text with a GPT-2 checkpoint: C++ and libflashkernel alone, no Python and no framework.
// gpt2 [--model DIR] [--prompt TEXT | --ids 1,2,3] [--max-new-tokens N] [--device cpu|cuda] [--dtype float32|float16]
// gpt2 --check FILE runs the cases of a JSON file (see expected.json) and exits with 1 if a token differs.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpt2.hpp"
#include "tokenizer.hpp"

namespace {

namespace fk = flashkernel;

struct Options {
  std::string model = GPT2_MODEL_DIR, prompt, ids, check, device = "cpu", dtype = "float32";
  std::int64_t max_new_tokens = 64;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (i + 1 >= argc) throw std::runtime_error(name + ": a value is needed after it (see the top of main.cpp)");
    const std::string value = argv[++i];
    if (name == "--model")
      options.model = value;
    else if (name == "--prompt")
      options.prompt = value;
    else if (name == "--ids")
      options.ids = value;
    else if (name == "--check")
      options.check = value;
    else if (name == "--device" && (value == "cpu" || value == "cuda"))
      options.device = value;
    else if (name == "--dtype" && (value == "float32" || value == "float16"))
      options.dtype = value;
    else if (name == "--max-new-tokens")
      options.max_new_tokens = std::stoll(value);
    else
      throw std::runtime_error(name + " " + value + ": not an option (see the top of main.cpp)");
  }
  return options;
}

std::vector<std::int32_t> integers(const std::string& text) {
  std::vector<std::int32_t> values;
  std::istringstream stream(text);
  for (std::string item; std::getline(stream, item, ',');) values.push_back(std::stoi(item));
  return values;
}

std::vector<std::int32_t> integers(const gpt2::Json& array) {
  std::vector<std::int32_t> values;
  for (const gpt2::Json& value : array.array()) values.push_back(static_cast<std::int32_t>(value.integer()));
  return values;
}

int check(const std::string& path, const gpt2::Tokenizer& tokenizer, gpt2::Gpt2& model) {
  int failures = 0, cases = 0;
  const gpt2::Json document = gpt2::Json::parse(gpt2::read_file(path));
  for (const gpt2::Json& expected : document["cases"].array()) {
    std::vector<std::int32_t> ids = integers(expected["ids"]), tokens;
    const auto wanted = static_cast<std::int64_t>(expected["tokens"].array().size());
    if (wanted > 0) tokens = model.generate(ids, wanted, [](std::int32_t) {});
    const bool encodes = tokenizer.encode(expected["prompt"].string()) == ids;
    const bool generates = tokens == integers(expected["tokens"]);
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    const bool decodes = tokenizer.decode(ids) == expected["text"].string();
    for (const auto& [right, what] : {std::pair{encodes, "encode"}, {generates, "generate"}, {decodes, "decode"}})
      if (!right) std::fprintf(stderr, "case %d: %s gives something else\n", cases, what);
    failures += !(encodes && generates && decodes);
    ++cases;
  }
  std::printf("%d of %d cases as expected\n", cases - failures, cases);
  return failures == 0 && cases > 0 ? 0 : 1;
}

int run(const Options& options) {
  const fk::Device device = options.device == "cuda" ? fk::Device::cuda(0) : fk::Device::cpu();
  const gpt2::Tokenizer tokenizer(options.model + "/tokenizer.json");
  gpt2::Gpt2 model(options.model, options.dtype == "float16" ? fk::DType::kFloat16 : fk::DType::kFloat32, device);
  if (!options.check.empty()) return check(options.check, tokenizer, model);
  const std::vector<std::int32_t> ids = options.ids.empty() ? tokenizer.encode(options.prompt) : integers(options.ids);
  std::printf("%s", tokenizer.decode(ids).c_str());
  model.generate(ids, options.max_new_tokens, [&](std::int32_t token) {
    std::printf("%s", tokenizer.decode({token}).c_str());
    std::fflush(stdout);
  });
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt2: %s\n", error.what());
    return 2;
  }
}
