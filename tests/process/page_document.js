// As much of a browser's document as the page of `kvasir inspect` uses: its
// script runs against this and leaves a tree that is written out as HTML.
"use strict";

const escaped = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;");

class Element {
  constructor(name) {
    this.name = name;
    this.attributes = "";
    this.children = [];
    this.heard = {};
  }
  addEventListener(event, hears) {
    this.heard[event] = hears;
  }
  // All of its elements of a name.
  find(name) {
    return this.children.filter(child => child instanceof Element)
        .flatMap(child => [...child.name === name ? [child] : [],
                           ...child.find(name)]);
  }
  setAttribute(name, value) {
    this.attributes += ` ${name}="${escaped(String(value))}"`;
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  get outerHTML() {
    const inside = this.children.map(child => child instanceof Element
        ? child.outerHTML : escaped(String(child)));
    return `<${this.name}${this.attributes}>${inside.join("")}</${this.name}>`;
  }
}

const main = new Element("main");
// `pageData` is the text of the page's data.
const document = {
  getElementById: () => ({textContent: pageData}),
  createElementNS: (namespace, name) => new Element(name),
  querySelector: () => main,
};
