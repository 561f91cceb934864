// A JSON reader in one page: what safetensors headers, config.json and tokenizer.json need, and nothing more.
// Used by safetensors.hpp, tokenizer.hpp and main.cpp. A malformed document is a std::runtime_error with its offset.
#pragma once

#include <cstdint>
#include <fstream>
#include <locale>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt2 {

class Json {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  static Json parse(const std::string& text) {
    Parser parser{text};
    Json value = parser.value(0);
    parser.skip_space();
    if (parser.at != text.size()) parser.fail("the end of the document");
    return value;
  }

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::kNull; }
  bool boolean() const { return expect(Kind::kBool, "a boolean").number_ != 0; }
  double number() const { return expect(Kind::kNumber, "a number").number_; }
  std::int64_t integer() const { return static_cast<std::int64_t>(number()); }
  const std::string& string() const { return expect(Kind::kString, "a string").string_; }
  const std::vector<Json>& array() const { return expect(Kind::kArray, "an array").array_; }
  const std::map<std::string, Json>& object() const { return expect(Kind::kObject, "an object").object_; }

  /// The member `key` of an object, or null where there is none.
  const Json& operator[](const std::string& key) const {
    static const Json kMissing;
    const auto found = object().find(key);
    return found == object().end() ? kMissing : found->second;
  }

 private:
  struct Parser {
    const std::string& text;
    std::size_t at = 0;

    [[noreturn]] void fail(const std::string& wanted) const {
      throw std::runtime_error("json: byte " + std::to_string(at) + "; " + wanted + " is needed there");
    }
    void skip_space() {
      while (at < text.size() && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t')) ++at;
    }
    bool take(char c) {
      skip_space();
      if (at >= text.size() || text[at] != c) return false;
      ++at;
      return true;
    }
    void need(char c) {
      if (!take(c)) fail(std::string("'") + c + "'");
    }
    bool take_word(const char* word) {
      const std::string expected(word);
      if (text.compare(at, expected.size(), expected) != 0) return false;
      at += expected.size();
      return true;
    }

    Json value(int depth) {
      if (depth > 100) fail("a document with at most 100 levels");
      skip_space();
      if (at >= text.size()) fail("a value");
      Json result;
      if (take('{')) {
        result.kind_ = Kind::kObject;
        if (take('}')) return result;
        do {
          skip_space();
          const std::string key = string();
          need(':');
          result.object_[key] = value(depth + 1);
        } while (take(','));
        need('}');
      } else if (take('[')) {
        result.kind_ = Kind::kArray;
        if (take(']')) return result;
        do result.array_.push_back(value(depth + 1));
        while (take(','));
        need(']');
      } else if (text[at] == '"') {
        result.kind_ = Kind::kString;
        result.string_ = string();
      } else if (take_word("true") || take_word("false")) {
        result.kind_ = Kind::kBool;
        result.number_ = text[at - 2] == 'u';  // tr[u]e, fal[s]e
      } else if (!take_word("null")) {
        result.kind_ = Kind::kNumber;
        std::size_t end = at;
        while (end < text.size() && std::string("+-.eE0123456789").find(text[end]) != std::string::npos) ++end;
        std::istringstream digits(text.substr(at, end - at));  // not std::stod: that follows the process's locale
        digits.imbue(std::locale::classic());
        if (end == at || !(digits >> result.number_)) fail("a value");
        at = end;
      }
      return result;
    }

    unsigned hex4() {
      unsigned code = 0;
      for (int i = 0; i < 4; ++i, ++at) {
        const char c = at < text.size() ? text[at] : '?';
        const std::size_t digit = std::string("0123456789abcdef").find(c >= 'A' && c <= 'F' ? char(c + 32) : c);
        if (digit == std::string::npos) fail("four hex digits");
        code = code * 16 + static_cast<unsigned>(digit);
      }
      return code;
    }

    std::string string() {
      if (at >= text.size() || text[at] != '"') fail("a string");
      ++at;
      std::string result;
      while (at < text.size() && text[at] != '"') {
        if (text[at] != '\\') {
          result += text[at++];
          continue;
        }
        const char escape = ++at < text.size() ? text[at++] : '?';
        const std::size_t plain = std::string("\"\\/bfnrt").find(escape);
        if (plain != std::string::npos) {
          result += "\"\\/\b\f\n\r\t"[plain];
        } else if (escape == 'u') {
          std::uint32_t code = hex4();
          if (code >= 0xD800 && code < 0xDC00 && take_word("\\u"))
            code = 0x10000 + ((code - 0xD800) << 10) + (hex4() - 0xDC00);
          append_utf8(result, code);
        } else {
          fail("an escape sequence");
        }
      }
      if (at >= text.size()) fail("the end of a string");
      ++at;
      return result;
    }
  };

 public:
  static void append_utf8(std::string& text, std::uint32_t code) {
    const auto put = [&text](std::uint32_t byte) { text += static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
    } else {
      put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F)), put(0x80 | (code >> 6 & 0x3F)),
          put(0x80 | (code & 0x3F));
    }
  }

 private:
  const Json& expect(Kind kind, const char* what) const {
    if (kind_ != kind) throw std::runtime_error(std::string("json: a value is not ") + what);
    return *this;
  }

  Kind kind_ = Kind::kNull;
  double number_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::map<std::string, Json> object_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace gpt2
