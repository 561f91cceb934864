// The public headers: each compiles alone (CMake makes one translation unit a header, see CMakeLists.txt, with nothing
// but include/ on its path), and none reaches a header that is neither the project's own nor the standard library's.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<fs::path> public_headers() {
  std::vector<fs::path> headers;
  for (const auto& entry : fs::recursive_directory_iterator(FK_PUBLIC_INCLUDE_DIR))
    if (entry.path().extension() == ".hpp" || entry.path().extension() == ".in") headers.push_back(entry.path());
  return headers;
}

TEST(PublicHeaders, IncludeTheirOwnKindAndTheStandardLibraryOnly) {
  // A standard header has neither a dot nor a slash: <cstdint>, never <cuda_runtime.h>, <Python.h> or <torch/torch.h>.
  const std::regex directive("^[ \t]*#[ \t]*include[ \t]*(.*)$"), own("\"flashkernel/[a-z_]+\\.hpp\""),
      standard("<[a-z_]+>");
  ASSERT_GE(public_headers().size(), 20u) << "looked in " << FK_PUBLIC_INCLUDE_DIR;
  for (const fs::path& header : public_headers()) {
    std::istringstream lines(text_of(header));
    for (std::string line; std::getline(lines, line);) {
      std::smatch found;
      if (!std::regex_match(line, found, directive)) continue;
      const std::string what = found[1].str().substr(0, found[1].str().find_last_of(">\"") + 1);
      EXPECT_TRUE(std::regex_match(what, own) || std::regex_match(what, standard)) << header << " includes " << what;
    }
  }
}

TEST(PublicHeaders, OpenWithACommentAndAreGuarded) {
  for (const fs::path& header : public_headers()) {
    const std::string text = text_of(header);
    EXPECT_EQ(text.rfind("//", 0), 0u) << header << " does not say what it is";
    EXPECT_NE(text.find("#pragma once"), std::string::npos) << header;
  }
}

}  // namespace
