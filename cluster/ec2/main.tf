terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.0"
    }
  }
}

provider "aws" {
  region = var.region
}

# The newest Debian 12 of its publisher, for the processor of the instance type.
data "aws_ami" "debian" {
  most_recent = true
  owners      = ["136693071363"]

  filter {
    name   = "name"
    values = ["debian-12-${var.architecture}-*"]
  }
}

data "aws_subnet" "chosen" {
  id = var.subnet
}

# One rack's neighbourhood: short paths, full rates between instances.
resource "aws_placement_group" "cluster" {
  name     = var.name
  strategy = "cluster"
}

resource "aws_key_pair" "operator" {
  key_name   = var.name
  public_key = file(var.public_key)
}

# Nothing but ssh from the operator comes in from outside; among themselves the hosts may do anything.
resource "aws_security_group" "cluster" {
  name        = var.name
  description = "rapidraid: ssh from the operator, everything among the hosts"
  vpc_id      = data.aws_subnet.chosen.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "operator" {
  security_group_id = aws_security_group.cluster.id
  cidr_ipv4         = var.operator
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
}

resource "aws_vpc_security_group_ingress_rule" "hosts" {
  security_group_id            = aws_security_group.cluster.id
  referenced_security_group_id = aws_security_group.cluster.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "out" {
  security_group_id = aws_security_group.cluster.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

# The nodes, and the client as the last one.
resource "aws_instance" "host" {
  count                       = var.nodes + 1
  ami                         = data.aws_ami.debian.id
  instance_type               = var.instance_type
  subnet_id                   = var.subnet
  placement_group             = aws_placement_group.cluster.id
  key_name                    = aws_key_pair.operator.key_name
  vpc_security_group_ids      = [aws_security_group.cluster.id]
  associate_public_ip_address = true

  # Credentials of the machine are for nobody here; without a role there are none, and without a hop no container gets at them.
  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  root_block_device {
    volume_type = "gp3"
    volume_size = var.disk_gib
    throughput  = var.disk_mib_s
    iops        = 4000
    encrypted   = true
  }

  connection {
    host        = self.public_ip
    user        = "admin"
    private_key = file(var.private_key)
  }

  provisioner "file" {
    source      = var.program
    destination = "/tmp/rapidraid"
  }

  # What experiments start on hosts to measure the network alone.
  provisioner "file" {
    source      = var.cluster_program
    destination = "/tmp/rapidraid-cluster"
  }

  provisioner "file" {
    source      = "${path.module}/../rapidraid-node.service"
    destination = "/tmp/rapidraid-node.service"
  }

  # The unit is installed and not started: an experiment starts its own daemons, and who wants a cluster that stays puts a node's
  # folder to /etc/rapidraid/node first (cluster/rapidraid-node.service).
  provisioner "remote-exec" {
    inline = [
      "sudo install -m 0755 /tmp/rapidraid /tmp/rapidraid-cluster /usr/local/bin/",
      "sudo install -m 0644 /tmp/rapidraid-node.service /etc/systemd/system/rapidraid-node.service",
      "sudo systemctl daemon-reload",
      "sudo install -d -o admin /srv/rapidraid",
      "sudo sysctl -w net.core.rmem_max=33554432 net.core.wmem_max=33554432",
    ]
  }

  tags = {
    Name = count.index < var.nodes ? "${var.name}-node-${count.index + 1}" : "${var.name}-client"
  }
}

locals {
  inventory = templatefile("${path.module}/inventory.tftpl", {
    key   = abspath(pathexpand(var.private_key))
    link  = "${var.instance_type}, one placement group of ${var.region}"
    hosts = aws_instance.host
  })
}

# By the shell, so that no provider but Amazon's is needed; destroy leaves the file.
resource "terraform_data" "inventory" {
  triggers_replace = [local.inventory, var.inventory]

  provisioner "local-exec" {
    command     = "printf '%s' \"$CONTENT\" > \"$FILE\""
    environment = { CONTENT = local.inventory, FILE = var.inventory }
  }
}
