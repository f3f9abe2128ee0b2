// What to try first: a click sends it. A base model for code does well with all of them.

export const EXAMPLES = [
  { title: "A class", message: "A class for a stack, with push, pop and peek." },
  { title: "A generator", message: "A generator of Fibonacci numbers." },
  { title: "A function", message: "A function that reads a JSON file and returns its keys." },
  { title: "A test", message: "Tests for a function that adds two numbers." },
];
