// Byte-level BPE (Sennrich et al., 2016; GPT-2's variant) from a tokenizer.json: text to ids and back. Used by
// main.cpp. Text is cut by GPT-2's pattern, 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+,
// the bytes of each piece are written as printable characters, and neighbours are joined in the order of the merges.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "json.hpp"
#include "unicode_classes.hpp"

namespace gpt2 {

class Tokenizer {
 public:
  explicit Tokenizer(const std::string& path) {
    const Json document = Json::parse(read_file(path));
    const Json& model = document["model"];
    const Json& cutter = document["pre_tokenizer"];
    if (model["type"].string() != "BPE" || cutter["type"].string() != "ByteLevel" ||
        cutter["add_prefix_space"].boolean() || !document["normalizer"].is_null())
      throw std::runtime_error(path + ": a byte-level BPE without normalizer and prefix space is needed");
    for (const auto& [piece, id] : model["vocab"].object()) add(piece, id.integer());
    std::int32_t rank = 0;
    for (const Json& merge : model["merges"].array()) {
      std::string left, right;
      if (merge.kind() == Json::Kind::kArray) {
        left = merge.array().at(0).string(), right = merge.array().at(1).string();
      } else {  // the older form: one string
        const std::size_t space = merge.string().find(' ');
        left = merge.string().substr(0, space), right = merge.string().substr(space + 1);
      }
      ranks_.emplace(std::make_pair(ids_.at(left), ids_.at(right)), Merge{rank++, ids_.at(left + right)});
    }
    for (const Json& token : document["added_tokens"].array()) {
      specials_[token["content"].string()] = static_cast<std::int32_t>(token["id"].integer());
      add(token["content"].string(), token["id"].integer());
    }
    // Bytes without a printable form of their own stand for the characters from 256 on.
    std::uint32_t next = 256;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      Json::append_utf8(printed_[byte], printable ? byte : next++);
      byte_of_[printed_[byte]] = static_cast<char>(byte);
    }
    if (!document["post_processor"].is_null())
      for (const Json& part : document["post_processor"]["single"].array()) {
        const Json& special = part["SpecialToken"];
        if (special.is_null()) break;  // the text itself: what would follow it is not supported
        first_.push_back(specials_.at(special["id"].string()));
      }
  }

  std::vector<std::int32_t> encode(const std::string& text) const {
    std::vector<std::int32_t> ids = first_;
    std::size_t begin = 0;
    while (begin < text.size()) {
      std::size_t found = text.size();
      const std::pair<const std::string, std::int32_t>* which = nullptr;
      for (const auto& special : specials_)
        if (const std::size_t at = text.find(special.first, begin); at < found) found = at, which = &special;
      cut(text.substr(begin, found - begin), ids);
      if (which != nullptr) ids.push_back(which->second);
      begin = found + (which == nullptr ? 0 : which->first.size());
    }
    return ids;
  }

  /// The bytes of some ids; special ones are left out.
  std::string decode(const std::vector<std::int32_t>& ids) const {
    std::string text;
    for (const std::int32_t id : ids) {
      const std::string& piece = pieces_.at(static_cast<std::size_t>(id));
      if (specials_.count(piece) != 0) continue;
      for (std::size_t at = 0; at < piece.size();) {
        const std::size_t bytes = static_cast<unsigned char>(piece[at]) < 0x80 ? 1 : 2;  // characters below 2048 only
        text += byte_of_.at(piece.substr(at, bytes));
        at += bytes;
      }
    }
    return text;
  }

 private:
  struct Merge {
    std::int32_t rank, id;
  };
  enum class Class { kSpace, kLetter, kDigit, kOther };

  void add(const std::string& piece, std::int64_t id) {
    if (id < 0 || id > 10000000) throw std::runtime_error("tokenizer.json: id " + std::to_string(id));
    ids_[piece] = static_cast<std::int32_t>(id);
    if (pieces_.size() <= static_cast<std::size_t>(id)) pieces_.resize(static_cast<std::size_t>(id) + 1);
    pieces_[static_cast<std::size_t>(id)] = piece;
  }

  static Class class_of(std::uint32_t code) {
    const auto within = [code](const CodeRange* begin, const CodeRange* end) {
      const CodeRange* range =
          std::lower_bound(begin, end, code, [](CodeRange r, std::uint32_t c) { return r.last < c; });
      return range != end && range->first <= code;
    };
    if (within(std::begin(kSpaces), std::end(kSpaces))) return Class::kSpace;
    if (within(std::begin(kLetters), std::end(kLetters))) return Class::kLetter;
    return within(std::begin(kNumbers), std::end(kNumbers)) ? Class::kDigit : Class::kOther;
  }

  // Cuts text without special tokens into pieces and appends their ids.
  void cut(const std::string& text, std::vector<std::int32_t>& ids) const {
    std::vector<std::size_t> begins;  // of each character, and the end
    std::vector<Class> classes;
    for (std::size_t at = 0; at < text.size();) {
      const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
      const unsigned lead = byte(at);
      const std::size_t bytes = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
      std::uint32_t code = bytes == 1 ? lead : lead & (0x7Fu >> bytes);
      for (std::size_t i = 1; i < bytes; ++i) {
        if (byte(at + i) >> 6 != 2) throw std::runtime_error("encode: the text is not valid UTF-8");
        code = code << 6 | (byte(at + i) & 0x3F);
      }
      if (bytes == 0) throw std::runtime_error("encode: the text is not valid UTF-8");
      begins.push_back(at);
      classes.push_back(class_of(code));
      at += bytes;
    }
    begins.push_back(text.size());
    const std::size_t count = classes.size();
    const auto run = [&](std::size_t from, Class kind) {  // end of the characters of one class
      while (from < count && classes[from] == kind) ++from;
      return from;
    };
    for (std::size_t at = 0; at < count;) {
      std::size_t end = at;
      for (const char* suffix : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
        if (end == at && text.compare(begins[at], std::char_traits<char>::length(suffix), suffix) == 0)
          end = at + std::char_traits<char>::length(suffix);
      if (end == at && classes[at] != Class::kSpace) end = run(at, classes[at]);
      if (end == at && text[begins[at]] == ' ' && at + 1 < count && classes[at + 1] != Class::kSpace)
        end = run(at + 1, classes[at + 1]);
      if (end == at) {  // white space; the last of it goes with what follows
        end = run(at, Class::kSpace);
        if (end < count && end - at > 1) --end;
      }
      join(text.substr(begins[at], begins[end] - begins[at]), ids);
      at = end;
    }
  }

  // Byte-pair merges of one piece: always the earliest merge of the list, the leftmost of equals.
  void join(const std::string& piece, std::vector<std::int32_t>& ids) const {
    std::vector<std::int32_t> parts;
    for (const char c : piece) parts.push_back(ids_.at(printed_[static_cast<unsigned char>(c)]));
    while (parts.size() > 1) {
      std::size_t where = parts.size();
      Merge best{INT32_MAX, 0};
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto found = ranks_.find({parts[i], parts[i + 1]});
        if (found != ranks_.end() && found->second.rank < best.rank) best = found->second, where = i;
      }
      if (where == parts.size()) break;
      parts[where] = best.id;
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(where) + 1);
    }
    ids.insert(ids.end(), parts.begin(), parts.end());
  }

  std::unordered_map<std::string, std::int32_t> ids_;
  std::vector<std::string> pieces_;
  std::map<std::pair<std::int32_t, std::int32_t>, Merge> ranks_;
  std::map<std::string, std::int32_t> specials_;
  std::array<std::string, 256> printed_;
  std::unordered_map<std::string, char> byte_of_;
  std::vector<std::int32_t> first_;
};

}  // namespace gpt2
