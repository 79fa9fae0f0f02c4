// Rules for the dashboard's modules; tests/dashboard/test_lint.py runs them.

import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    languageOptions: { ecmaVersion: 2024, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      complexity: ["error", 15],
      "consistent-return": "error",
      eqeqeq: "error",
      "no-console": "error",
      "no-implicit-coercion": "error",
      "no-param-reassign": "error",
      "no-shadow": "error",
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": ["error", { destructuring: "all" }],
      "prefer-template": "error",
    },
  },
  { files: ["**/theme.js", "**/readable.js"], languageOptions: { sourceType: "script" } },
  { files: ["**/readable.js"], rules: { "no-unused-expressions": "off" } },
];
